use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::relay::InFlightItem;
use crate::{Claimed, Failure, Outcome, lock};

/// Delivers items.
///
/// # Laws
///
/// - Every [`Delivery`] is reported exactly once, as soon as its outcome is known, in any order. The type ensures this:
///   reporting consumes the delivery, and one that is dropped (because `deliver` returned early or panicked) is
///   reported as a transient failure.
/// - A sink MUST NOT make one item wait for an unrelated one. It may return from `deliver` while deliveries are still
///   running; the relay bounds how many there are.
/// - A sink reports what happened and decides nothing: [`decide`](crate::decide) decides if the item is tried again.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// The type of the items.
    type Item: Send + Sync + 'static;

    /// Delivers each item, and reports its outcome.
    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>);
}

/// One claimed item that a sink delivers.
pub struct Delivery<T> {
    item: Arc<InFlightItem<T>>,
    /// The items of the same key after this one.
    rest: VecDeque<Arc<InFlightItem<T>>>,
    started: Instant,
    reporter: Option<Arc<dyn Reporter<T>>>,
}

/// Receives the outcome of a delivery: the relay, or a test.
pub(crate) trait Reporter<T>: Send + Sync {
    fn report(
        &self,
        item: Arc<InFlightItem<T>>,
        rest: VecDeque<Arc<InFlightItem<T>>>,
        outcome: Outcome,
        took: Duration,
    );

    fn may_start(&self, item: &InFlightItem<T>) -> bool;
}

impl<T> Delivery<T> {
    pub(crate) fn new(
        item: Arc<InFlightItem<T>>,
        rest: VecDeque<Arc<InFlightItem<T>>>,
        reporter: Arc<dyn Reporter<T>>,
    ) -> Self {
        Self { item, rest, started: Instant::now(), reporter: Some(reporter) }
    }

    /// A delivery without a relay, to test a sink by itself.
    pub fn detached(claimed: Claimed<T>) -> (Self, oneshot::Receiver<Outcome>) {
        let (sender, receiver) = oneshot::channel();
        let reporter = Arc::new(Detached(std::sync::Mutex::new(Some(sender))));
        (Self::new(Arc::new(InFlightItem::detached(claimed)), VecDeque::new(), reporter), receiver)
    }

    /// The item to deliver.
    pub fn item(&self) -> &T {
        &self.item.claimed.item
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.item.claimed.attempt
    }

    /// How much memory the item needs.
    pub fn bytes(&self) -> usize {
        self.item.claimed.bytes
    }

    /// True if the delivery may start now. A sink that keeps deliveries waiting checks this when it starts one: the lease
    /// may have ended, or the item may be revoked. It reports such a delivery as snoozed.
    pub fn may_start(&self) -> bool {
        self.reporter.as_ref().is_some_and(|reporter| reporter.may_start(&self.item))
    }

    /// Reports the outcome.
    pub fn report(mut self, outcome: impl Into<Outcome>) {
        self.send_report(outcome.into());
    }

    fn send_report(&mut self, outcome: Outcome) {
        if let Some(reporter) = self.reporter.take() {
            reporter.report(self.item.clone(), std::mem::take(&mut self.rest), outcome, self.started.elapsed());
        }
    }
}

impl<T> Drop for Delivery<T> {
    fn drop(&mut self) {
        let failure = match std::thread::panicking() {
            true => Failure::transient("panicked", "the delivery panicked"),
            false => Failure::transient("unreported", "the delivery ended without an outcome"),
        };
        self.send_report(Outcome::Failed(failure));
    }
}

struct Detached(std::sync::Mutex<Option<oneshot::Sender<Outcome>>>);

impl<T> Reporter<T> for Detached {
    fn report(&self, _: Arc<InFlightItem<T>>, _: VecDeque<Arc<InFlightItem<T>>>, outcome: Outcome, _: Duration) {
        if let Some(sender) = lock(&self.0).take() {
            // A test may have dropped the receiver.
            let _ = sender.send(outcome);
        }
    }

    fn may_start(&self, _: &InFlightItem<T>) -> bool {
        true
    }
}

use std::future::Future;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use posthaste_core::{Delivery, Outcome, Sink, lock};
use tokio::sync::Notify;

type Answer<T> = Box<dyn Fn(&T, u32) -> BoxFuture<'static, Outcome> + Send + Sync>;

/// A sink that remembers its deliveries and returns the outcomes that a test wants.
///
/// Clones share the deliveries, so a test keeps one clone and gives another to the relay.
pub struct MemorySink<T>(Arc<Inner<T>>);

struct Inner<T> {
    answer: Answer<T>,
    started: Mutex<Vec<T>>,
    delivered: Mutex<Vec<T>>,
    changed: Notify,
}

impl<T> Clone for MemorySink<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Clone + Send + Sync + 'static> MemorySink<T> {
    /// A sink that accepts every delivery.
    pub fn accepting() -> Self {
        Self::answering(|_, _| async { Outcome::Delivered })
    }

    /// A sink that computes the outcome from the item and the number of its attempt.
    pub fn answering<F, R>(answer: F) -> Self
    where
        F: Fn(&T, u32) -> R + Send + Sync + 'static,
        R: Future<Output = Outcome> + Send + 'static,
    {
        Self(Arc::new(Inner {
            answer: Box::new(move |item, attempt| answer(item, attempt).boxed()),
            started: Mutex::default(),
            delivered: Mutex::default(),
            changed: Notify::new(),
        }))
    }

    /// The items of all deliveries that started, in order. An item appears once per attempt.
    pub fn started(&self) -> Vec<T> {
        lock(&self.0.started).clone()
    }

    /// The items of all deliveries that ended with [`Outcome::Delivered`], in the order in which they ended.
    pub fn delivered(&self) -> Vec<T> {
        lock(&self.0.delivered).clone()
    }

    /// Waits until this many deliveries started.
    pub async fn wait_for_started(&self, count: usize) {
        self.wait_until(|sink| lock(&sink.0.started).len() >= count).await;
    }

    /// Waits until this many deliveries succeeded.
    pub async fn wait_for_delivered(&self, count: usize) {
        self.wait_until(|sink| lock(&sink.0.delivered).len() >= count).await;
    }

    async fn wait_until(&self, enough: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.0.changed.notified();
            if enough(self) {
                return;
            }
            changed.await;
        }
    }

    async fn deliver_one(&self, delivery: Delivery<T>) {
        let item = delivery.item().clone();
        lock(&self.0.started).push(item.clone());
        self.0.changed.notify_waiters();
        let outcome = (self.0.answer)(&item, delivery.attempt()).await;
        if outcome == Outcome::Delivered {
            lock(&self.0.delivered).push(item);
        }
        delivery.report(outcome);
        self.0.changed.notify_waiters();
    }
}

#[async_trait]
impl<T: Clone + Send + Sync + 'static> Sink for MemorySink<T> {
    type Item = T;

    async fn deliver(&self, batch: Vec<Delivery<T>>) {
        join_all(batch.into_iter().map(|delivery| self.deliver_one(delivery))).await;
    }
}

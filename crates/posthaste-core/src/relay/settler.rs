use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::completions::{Batch, Completion};
use super::in_flight::InFlightItem;
use super::shared::Shared;
use crate::backoff::{Backoff, doubled};
use crate::{Disposition, FaultKind, Settled, Settlement, Source, StoreError};

/// The pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause before an outcome that the store refused is tried again.
const LONGEST_REFUSED: Duration = Duration::from_secs(30);
/// How often a release that the store refuses for good is tried again.
const MOST_RELEASES: u32 = 5;
/// The longest wait before a store that failed, or a row that another transaction locked, is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Settles outcomes in batches, and at the `end` those that are left.
pub(super) async fn settle<S: Source>(shared: Arc<Shared<S>>, end: CancellationToken) {
    let mut settler = Settler { shared: &*shared, postponed: Vec::new(), linger_until: Instant::now() };
    while !end.is_cancelled() {
        tokio::select! {
            biased;
            () = end.cancelled() => {}
            () = gather(&shared) => {}
            () = settler.next_postponed() => {}
        }
        settler.flush(&end).await;
    }
    settler.flush(&end).await;
}

/// Waits for a first outcome, then a moment longer while more are expected.
async fn gather<S: Source>(shared: &Shared<S>) {
    shared.completions.added.notified().await;
    let until = Instant::now() + shared.options.settle_linger;
    while !shared.completions.take_urgent() && shared.expects_more_completions() {
        if timeout_at(until, shared.completions.added.notified()).await.is_err() {
            return;
        }
    }
}

struct Settler<'a, S: Source> {
    shared: &'a Shared<S>,
    /// Outcomes that could not be settled while others could, each with the time of its next try. None is given up:
    /// an item that is never settled would be neither done nor due.
    postponed: Vec<(Instant, Completion<S::Item>)>,
    /// Outcomes of hot items wait until then for more of them.
    linger_until: Instant,
}

impl<S: Source> Settler<'_, S> {
    /// Waits until a postponed outcome is to be tried again.
    async fn next_postponed(&self) {
        match self.postponed.iter().map(|(due, _)| *due).min() {
            Some(due) => sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// Settles and releases everything in the completion buffer. Outcomes of hot items stay there until `linger_until`
    /// or the `end`, so that many concurrent writers cause few statements.
    async fn flush(&mut self, end: &CancellationToken) {
        let shared = self.shared;
        // At the end every postponed outcome gets one last try.
        let mut is_last_try = end.is_cancelled();
        loop {
            while !end.is_cancelled() && shared.completions.may_linger(shared.enough_completions()) {
                tokio::select! {
                    biased;
                    () = end.cancelled() => {}
                    () = sleep_until(self.linger_until) => break,
                    () = shared.completions.added.notified() => {}
                }
            }
            let Batch { mut completed, released } = shared.completions.take_batch();
            let now = Instant::now();
            let due =
                self.postponed.extract_if(.., |(due, _)| is_last_try || *due <= now).map(|(_, completion)| completion);
            // An outcome that the store refused before would make it refuse the whole batch.
            let (refused, waited): (Vec<_>, Vec<_>) = due.partition(|completion| completion.refusals > 0);
            completed.extend(waited);
            is_last_try = false;
            if completed.is_empty() && refused.is_empty() && released.is_empty() {
                return;
            }
            self.linger_until = now + shared.options.settle_linger;
            self.settle_all(completed).await;
            for one in refused {
                self.settle_all(vec![one]).await;
            }
            if !released.is_empty() {
                self.release(released).await;
            }
        }
    }

    /// Tries until the store accepts or refuses the outcomes. Meanwhile nothing is claimed and no delivery starts: the
    /// known outcomes must be settled first.
    async fn settle_all(&mut self, completed: Vec<Completion<S::Item>>) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        while !completed.is_empty() {
            match self.settle_some(&completed).await {
                Ok(settled) => return self.apply(completed, settled),
                Err(error) if error.kind() == FaultKind::Permanent => {
                    return self.settle_one_by_one(completed, &error).await;
                }
                Err(error) => self.pause(&error, &mut backoff).await,
            }
        }
    }

    /// The store refused a batch with a permanent error. Settles the outcomes one by one, because one bad outcome must
    /// not block the others. Outcomes that the store refuses again are postponed.
    async fn settle_one_by_one(&mut self, completed: Vec<Completion<S::Item>>, error: &StoreError) {
        let is_alone = completed.len() == 1;
        let (mut refused, mut succeeded) = (Vec::new(), false);
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for one in completed {
            let settled = loop {
                if is_alone {
                    break None;
                }
                match self.settle_some(std::slice::from_ref(&one)).await {
                    Ok(settled) => break Some(settled),
                    Err(error) if error.kind() == FaultKind::Permanent => break None,
                    Err(error) => self.pause(&error, &mut backoff).await,
                }
            };
            match settled {
                Some(settled) => {
                    succeeded = true;
                    self.apply(vec![one], settled);
                }
                None => refused.push(one),
            }
        }
        // If the store refuses each of several outcomes for the first time, the cause may be the store and not an item:
        // then no delivery starts until one of them is tried again.
        if succeeded || is_alone || refused.iter().any(|one| one.refusals > 0) {
            self.answered(true);
        }
        for mut one in refused {
            one.refusals += 1;
            self.shared.metrics.refused();
            tracing::error!(
                relay = self.shared.name,
                refusals = one.refusals,
                error = error.chain(),
                "the store refuses the outcome of one item: it stays in flight and is tried again"
            );
            let due = Instant::now() + doubled(FIRST_PAUSE, LONGEST_REFUSED, one.refusals);
            self.postponed.push((due, one));
        }
    }

    /// Logs that the store is out of reach or did not respond, and waits.
    async fn pause(&self, error: &StoreError, backoff: &mut Backoff) {
        tracing::warn!(
            relay = self.shared.name,
            error = error.chain(),
            "failed to settle: no new deliveries start until it succeeds"
        );
        sleep(backoff.next_pause()).await;
    }

    fn answered(&self, succeeded: bool) {
        self.shared.backpressure.answered(&self.shared.backpressure.settling, succeeded);
        // The claimer waits for room, and for settlements that succeed.
        self.shared.in_flight.freed.notify_waiters();
    }

    /// One attempt. A panic of the store is an error like any other, so that no outcome is lost.
    async fn settle_some(&self, completed: &[Completion<S::Item>]) -> Result<Vec<Settled>, StoreError> {
        let settlements = completed.iter().map(|completion| Settlement {
            claimed: &completion.item.claimed,
            disposition: &completion.disposition,
            took: completion.took,
        });
        let settlements: Vec<_> = settlements.collect();
        let (shared, statement) = (self.shared, &self.shared.backpressure.settling);
        shared.backpressure.sent(statement, shared.clock.now());
        let settled = AssertUnwindSafe(shared.source.settle(&settlements)).catch_unwind().await;
        let settled = settled.unwrap_or_else(|_| Err(panicked("settle")));
        self.answered(settled.is_ok());
        settled
    }

    fn apply(&mut self, completed: Vec<Completion<S::Item>>, settled: Vec<Settled>) {
        let shared = self.shared;
        let (mut finished, mut made) = (Vec::with_capacity(completed.len()), 0);
        for (mut completion, settled) in completed.into_iter().zip(settled) {
            shared.metrics.settled(&completion.disposition, settled, completion.took);
            match settled {
                Settled::Locked => {
                    completion.lock_waits += 1;
                    let pause = doubled(FIRST_PAUSE, LONGEST_PAUSE, completion.lock_waits);
                    self.postponed.push((Instant::now() + pause, completion));
                    continue;
                }
                Settled::LostLease => shared.in_flight.revoke_run(&completion.item),
                Settled::Applied => {}
            }
            if let Disposition::Retry { after, .. } = completion.disposition {
                shared.next_due.expect(after);
            }
            made += usize::from(completion.is_made);
            finished.push(completion.item);
        }
        shared.backpressure.remove_unsettled(made);
        shared.remove(&finished);
    }

    async fn release(&self, released: Vec<Arc<InFlightItem<S::Item>>>) {
        let claims: Vec<_> = released.iter().map(|item| &item.claimed).collect();
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for attempt in 0.. {
            let answer = AssertUnwindSafe(self.shared.source.release(&claims)).catch_unwind().await;
            let answer = answer.unwrap_or_else(|_| Err(panicked("release claims")));
            let Err(error) = answer else { break };
            tracing::warn!(relay = self.shared.name, error = error.chain(), "failed to release claims; trying again");
            if error.kind() == FaultKind::Permanent && attempt >= MOST_RELEASES {
                // Outcomes wait for this to finish, and the leases end by themselves.
                break;
            }
            sleep(backoff.next_pause()).await;
        }
        self.shared.next_due.expect(Duration::ZERO);
        self.shared.remove(&released);
    }
}

fn panicked(doing: &'static str) -> StoreError {
    StoreError::new(doing, FaultKind::Permanent, "the store panicked")
}

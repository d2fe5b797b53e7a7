use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Held;
use super::flow::{Decided, Flow, Pile};
use crate::{Disposition, FaultKind, Settled, Settlement, Source, StoreError};

/// The longest wait before an outcome that the store refused is tried again.
const LONGEST_REFUSED: Duration = Duration::from_secs(30);
/// How often a release that the store refuses for good is tried again.
const MOST_RELEASES: u32 = 5;
/// The longest wait before a store that failed, or a row that another transaction locked, is tried again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Records outcomes in groups, and at the `end` what is left.
pub(super) async fn settle<S: Source>(flow: Arc<Flow<S>>, end: CancellationToken) {
    let mut settler = Settler { flow: &*flow, postponed: Vec::new(), linger_until: Instant::now() };
    while !end.is_cancelled() {
        tokio::select! {
            biased;
            () = end.cancelled() => {}
            () = gather(&flow) => {}
            () = settler.next_postponed() => {}
        }
        settler.flush(&end).await;
    }
    settler.flush(&end).await;
}

/// Waits for a first outcome, then as long as it pays for more.
async fn gather<S: Source>(flow: &Flow<S>) {
    flow.piled.notified().await;
    let until = Instant::now() + flow.options.settle_linger;
    while !flow.urgent.swap(false, Ordering::AcqRel) && flow.more_on_the_way() {
        if timeout_at(until, flow.piled.notified()).await.is_err() {
            return;
        }
    }
}

struct Settler<'a, S: Source> {
    flow: &'a Flow<S>,
    /// Outcomes that could not be recorded while others could, each with the time of its next try. None is given up:
    /// an item without an outcome on record would be neither done nor due.
    postponed: Vec<(Instant, Decided<S::Item>)>,
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

    /// Records everything that waits. Outcomes of hot items stay there until `linger_until`, so that many writers at
    /// once make few statements, or until the `end`.
    async fn flush(&mut self, end: &CancellationToken) {
        let flow = self.flow;
        // At the end every postponed outcome gets one last try.
        let mut is_last_try = end.is_cancelled();
        loop {
            while !end.is_cancelled() && flow.nobody_waits() {
                tokio::select! {
                    biased;
                    () = end.cancelled() => {}
                    () = sleep_until(self.linger_until) => break,
                    () = flow.piled.notified() => {}
                }
            }
            flow.urgent.store(false, Ordering::Release);
            let Pile { mut decided, released } = flow.take_pile();
            let now = Instant::now();
            let due = self.postponed.extract_if(.., |(due, _)| is_last_try || *due <= now).map(|(_, decided)| decided);
            // What the store has refused would make it refuse the others, too.
            let (refused, waited): (Vec<_>, Vec<_>) = due.partition(|decided| decided.refusals > 0);
            decided.extend(waited);
            is_last_try = false;
            if decided.is_empty() && refused.is_empty() && released.is_empty() {
                return;
            }
            self.linger_until = now + flow.options.settle_linger;
            self.record(decided).await;
            for one in refused {
                self.record(vec![one]).await;
            }
            if !released.is_empty() {
                self.release(released).await;
            }
        }
    }

    /// Tries until the store answers. Meanwhile nothing is claimed and nothing new is started: what is known must be on
    /// record first.
    async fn record(&mut self, decided: Vec<Decided<S::Item>>) {
        let mut failures = 0;
        while !decided.is_empty() {
            match self.settle_some(&decided).await {
                Ok(settled) => return self.apply(decided, settled),
                Err(error) if error.kind() == FaultKind::Lasting => {
                    return self.record_one_by_one(decided, &error).await;
                }
                Err(error) => self.pause(&error, &mut failures).await,
            }
        }
    }

    /// The store refused a batch for good: one outcome that cannot be recorded must not keep the others from it. Those that
    /// it refuses one by one, too, are postponed.
    async fn record_one_by_one(&mut self, decided: Vec<Decided<S::Item>>, error: &StoreError) {
        let is_alone = decided.len() == 1;
        let (mut refused, mut succeeded, mut failures) = (Vec::new(), false, 0);
        for one in decided {
            let settled = loop {
                if is_alone {
                    break None;
                }
                match self.settle_some(std::slice::from_ref(&one)).await {
                    Ok(settled) => break Some(settled),
                    Err(error) if error.kind() == FaultKind::Lasting => break None,
                    Err(error) => self.pause(&error, &mut failures).await,
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
        // When it refuses each of several that it never refused before, it may be no item's fault: then nothing new is
        // started until one of them is tried again.
        if succeeded || is_alone || refused.iter().any(|one| one.refusals > 0) {
            self.answered(true);
        }
        for mut one in refused {
            one.refusals += 1;
            self.flow.meters.refused();
            tracing::error!(
                relay = self.flow.name,
                refusals = one.refusals,
                error = error.chain(),
                "the store refuses the outcome of one item: it stays in flight and is tried again"
            );
            let due = Instant::now() + backoff(one.refusals, LONGEST_REFUSED);
            self.postponed.push((due, one));
        }
    }

    /// The store could not be asked, or did not answer.
    async fn pause(&self, error: &StoreError, failures: &mut u32) {
        tracing::warn!(
            relay = self.flow.name,
            error = error.chain(),
            "failed to settle: no new deliveries start until it succeeds"
        );
        sleep(backoff(*failures, LONGEST_PAUSE)).await;
        *failures += 1;
    }

    fn answered(&self, succeeded: bool) {
        self.flow.backpressure.answered(&self.flow.backpressure.settling, succeeded);
        // The claimer waits for room, and for settlements that succeed.
        self.flow.freed.notify_waiters();
    }

    /// One attempt. A panic of the store is an error like any other, so that no outcome is forgotten.
    async fn settle_some(&self, decided: &[Decided<S::Item>]) -> Result<Vec<Settled>, StoreError> {
        let settlements = decided.iter().map(|decided| Settlement {
            claimed: &decided.held.claimed,
            disposition: &decided.disposition,
            took: decided.took,
        });
        let settlements: Vec<_> = settlements.collect();
        let (flow, statement) = (self.flow, &self.flow.backpressure.settling);
        flow.backpressure.sent(statement, flow.clock.now());
        let settled = AssertUnwindSafe(flow.source.settle(&settlements)).catch_unwind().await;
        let settled = settled.unwrap_or_else(|_| Err(panicked("settle")));
        self.answered(settled.is_ok());
        settled
    }

    fn apply(&mut self, decided: Vec<Decided<S::Item>>, settled: Vec<Settled>) {
        let flow = self.flow;
        let mut finished = Vec::with_capacity(decided.len());
        for (mut decided, settled) in decided.into_iter().zip(settled) {
            flow.meters.settled(&decided.disposition, settled, decided.took);
            match settled {
                Settled::Locked => {
                    decided.waits += 1;
                    self.postponed.push((Instant::now() + backoff(decided.waits, LONGEST_PAUSE), decided));
                    continue;
                }
                Settled::LostLease => flow.revoke_run(&decided.held),
                Settled::Applied => {}
            }
            if let Disposition::Retry { after, .. } = decided.disposition {
                flow.expect_due(after);
            }
            finished.push(decided.held);
        }
        flow.backpressure.remove_unsettled(finished.len());
        flow.forget(&finished);
    }

    async fn release(&self, released: Vec<Arc<Held<S::Item>>>) {
        let claims: Vec<_> = released.iter().map(|held| &held.claimed).collect();
        let mut failures = 0;
        loop {
            let answer = AssertUnwindSafe(self.flow.source.release(&claims)).catch_unwind().await;
            let answer = answer.unwrap_or_else(|_| Err(panicked("release claims")));
            let Err(error) = answer else { break };
            tracing::warn!(relay = self.flow.name, error = error.chain(), "failed to release claims; trying again");
            if error.kind() == FaultKind::Lasting && failures >= MOST_RELEASES {
                // Outcomes wait behind this, and leases end by themselves.
                break;
            }
            sleep(backoff(failures, LONGEST_PAUSE)).await;
            failures += 1;
        }
        self.flow.expect_due(Duration::ZERO);
        self.flow.forget(&released);
    }
}

fn panicked(doing: &'static str) -> StoreError {
    StoreError::new(doing, FaultKind::Lasting, "the store panicked")
}

fn backoff(failures: u32, longest: Duration) -> Duration {
    Duration::from_millis(20 << failures.min(16)).min(longest)
}

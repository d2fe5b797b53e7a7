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
            let due = self.postponed.extract_if(.., |(due, _)| is_last_try || *due <= now);
            decided.extend(due.map(|(_, decided)| decided));
            is_last_try = false;
            if decided.is_empty() && released.is_empty() {
                return;
            }
            self.linger_until = now + flow.options.settle_linger;
            if !decided.is_empty() {
                self.record(decided).await;
            }
            if !released.is_empty() {
                self.release(released).await;
            }
        }
    }

    /// Tries until the store answers. Meanwhile nothing is claimed and nothing new is started: what is known must be on
    /// record first.
    async fn record(&mut self, mut decided: Vec<Decided<S::Item>>) {
        let mut failures = 0;
        while !decided.is_empty() {
            let error = match self.settle_some(&decided).await {
                Ok(settled) => return self.apply(decided, settled),
                Err(error) => error,
            };
            if error.kind() == FaultKind::Lasting {
                decided = self.record_one_by_one(decided, &error).await;
            }
            if !decided.is_empty() {
                tracing::warn!(
                    relay = self.flow.name,
                    outcomes = decided.len(),
                    error = error.chain(),
                    "failed to settle: no new deliveries start until it succeeds"
                );
                sleep(backoff(failures, LONGEST_PAUSE)).await;
                failures += 1;
            }
        }
    }

    /// The store refused a batch for good: one outcome that cannot be recorded must not keep the others from it. Returns
    /// all of them when it refuses each: then it is no item's fault, and somebody has to mend the store.
    async fn record_one_by_one(&mut self, decided: Vec<Decided<S::Item>>, error: &StoreError) -> Vec<Decided<S::Item>> {
        let is_alone = decided.len() == 1;
        let (mut refused, mut succeeded) = (Vec::new(), false);
        for one in decided {
            if is_alone {
                refused.push(one);
                break;
            }
            match self.settle_some(std::slice::from_ref(&one)).await {
                Ok(settled) => {
                    succeeded = true;
                    self.apply(vec![one], settled);
                }
                Err(_) => refused.push(one),
            }
        }
        if !succeeded && !is_alone {
            return refused;
        }
        self.flow.backpressure.answered(&self.flow.backpressure.settling, true);
        for mut one in refused {
            one.refusals += 1;
            self.flow.meters.refused();
            tracing::error!(
                relay = self.flow.name,
                refusals = one.refusals,
                error = error.chain(),
                "the store refuses the outcome of one item: it stays in flight and is tried again"
            );
            self.postpone(one, LONGEST_REFUSED);
        }
        Vec::new()
    }

    fn postpone(&mut self, decided: Decided<S::Item>, longest: Duration) {
        self.postponed.push((Instant::now() + backoff(decided.refusals, longest), decided));
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
        let settled =
            settled.unwrap_or_else(|_| Err(StoreError::new("settle", FaultKind::Lasting, "the store panicked")));
        flow.backpressure.answered(statement, settled.is_ok());
        settled
    }

    fn apply(&mut self, decided: Vec<Decided<S::Item>>, settled: Vec<Settled>) {
        let flow = self.flow;
        let mut finished = Vec::with_capacity(decided.len());
        for (mut decided, settled) in decided.into_iter().zip(settled) {
            flow.meters.settled(&decided.disposition, settled, decided.took);
            match settled {
                Settled::Locked => {
                    decided.refusals += 1;
                    self.postpone(decided, LONGEST_PAUSE);
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
        while let Err(error) = self.flow.source.release(&claims).await {
            tracing::warn!(relay = self.flow.name, error = error.chain(), "failed to release claims; trying again");
            sleep(backoff(failures, LONGEST_PAUSE)).await;
            failures += 1;
        }
        self.flow.expect_due(Duration::ZERO);
        self.flow.forget(&released);
    }
}

fn backoff(failures: u32, longest: Duration) -> Duration {
    Duration::from_millis(20 << failures.min(16)).min(longest)
}

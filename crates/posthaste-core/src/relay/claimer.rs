use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::LONGEST_WAIT;
use super::renewer::deadline;
use super::shared::Shared;
use crate::wakeup::PROBES;
use crate::{Backoff, Signal, Source};

/// A claim is worthwhile when there is room for one part in this many of a batch. With less room the claimer waits a
/// moment for more: many small claims cost more than one large claim.
const WORTH_CLAIMING: usize = 4;

/// Claims whenever there is room and something may be due, until `stop`.
pub(super) async fn claim<S: Source>(shared: Arc<Shared<S>>, stop: CancellationToken) {
    let (shared, stop) = (&*shared, &stop);
    let mut probes = [].iter();
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = room(shared) => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = renewed(shared) => {}
        }
        let asked = Instant::now();
        shared.next_due.forget_due(asked);
        let before = shared.clock.now();
        let limit = shared.in_flight.room().min(shared.options.batch.max(1));
        // A stop does not cancel the claim before the drain time is over: the items of a cancelled claim stay claimed
        // until their lease ends.
        let claimed = tokio::select! {
            biased;
            claimed = shared.source.claim(limit) => claimed,
            () = drained(shared, stop) => {
                tracing::warn!(
                    relay = shared.name,
                    "a claim did not finish within the drain time: its items stay claimed until their lease ends"
                );
                return;
            }
        };
        let next_due = match claimed {
            Ok(claim) => {
                backoff.reset();
                let full = claim.items.len() >= limit;
                if !claim.items.is_empty() {
                    shared.accept(claim.items, deadline(before, shared.source.lease()));
                }
                if full {
                    continue;
                }
                claim.next_due
            }
            Err(error) => {
                tracing::warn!(relay = shared.name, error = error.chain(), "failed to claim; trying again");
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = sleep(backoff.next_pause()) => {}
                }
                continue;
            }
        };
        let mut wait = shared.options.poll_interval.min(next_due.unwrap_or(Duration::MAX));
        if let Some(probe) = probes.next() {
            wait = wait.min(*probe);
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            signal = shared.source.wakeup().signalled() => {
                if signal == Signal::Soon {
                    probes = PROBES.iter();
                }
            }
            () = due(shared, asked + wait.clamp(Duration::from_millis(1), LONGEST_WAIT)) => {}
        }
    }
}

/// Waits for the end of the drain time.
async fn drained<S: Source>(shared: &Shared<S>, stop: &CancellationToken) {
    stop.cancelled().await;
    sleep(shared.options.drain).await;
}

/// Waits until there is room for a claim, and a moment longer for enough room to make it worthwhile.
async fn room<S: Source>(shared: &Shared<S>) {
    let worth = (shared.options.batch / WORTH_CLAIMING).min(shared.options.max_in_flight / 2).max(1);
    let mut patience = None;
    loop {
        // Created before the check, so that room freed in between is not missed.
        let freed = shared.in_flight.freed.notified();
        let room = shared.in_flight.room();
        if !shared.backpressure.settling.is_failing() {
            if room >= worth {
                return;
            }
            if room > 0 {
                let until = *patience.get_or_insert_with(|| Instant::now() + shared.options.settle_linger * 2);
                tokio::select! {
                    biased;
                    () = freed => continue,
                    () = sleep_until(until) => return,
                }
            }
        }
        freed.await;
    }
}

/// Waits for a renewal that is overdue. After a pause of the whole process the leases of its own items may have ended: a
/// claim before the renewal could return an item that is still being delivered here.
async fn renewed<S: Source>(shared: &Shared<S>) {
    loop {
        // Created before the check, so that no signal in between is missed.
        let (renewed, freed) = (shared.renewed.notified(), shared.in_flight.freed.notified());
        if shared.in_flight.len() == 0 || !shared.is_renewal_overdue() {
            return;
        }
        shared.renew_soon.notify_one();
        tokio::select! {
            () = renewed => {}
            () = freed => {}
        }
    }
}

/// Sleeps until `at`, or until a retry that became known in the meantime is due.
async fn due<S: Source>(shared: &Shared<S>, at: Instant) {
    loop {
        let until = shared.next_due.get().map_or(at, |due| due.min(at));
        tokio::select! {
            biased;
            () = sleep_until(until) => return,
            () = shared.next_due.moved.notified() => {}
        }
    }
}

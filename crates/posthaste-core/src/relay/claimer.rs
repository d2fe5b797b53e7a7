use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::LONGEST_WAIT;
use super::renewer::deadline;
use super::shared::Shared;
use crate::wakeup::PROBES;
use crate::{Backoff, Signal, Source};

/// Below this share of a batch, a claim waits a moment for more room: many small claims cost more than one larger.
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
        let asked = Instant::now();
        shared.next_due.forget_due(asked);
        let before = shared.clock.now();
        let limit = shared.in_flight.room().min(shared.options.batch.max(1));
        // Not cut short as long as the drain time lasts: a claim whose answer is thrown away stays claimed until its lease
        // ends.
        let claimed = tokio::select! {
            biased;
            claimed = shared.source.claim(limit) => claimed,
            () = drained(shared, stop) => {
                tracing::warn!(relay = shared.name, "the source did not answer a claim before the stop: items that it leased wait until their lease ends");
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

/// Waits until something may be claimed, and a moment longer for enough room to make it worth while.
async fn room<S: Source>(shared: &Shared<S>) {
    let worth = (shared.options.batch / WORTH_CLAIMING).min(shared.options.max_in_flight / 2).max(1);
    let mut patience = None;
    loop {
        // Made before looking, so that what is freed in between is not missed.
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

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::LONGEST_WAIT;
use super::flow::Flow;
use super::renewer::deadline;
use crate::wakeup::PROBES;
use crate::{Signal, Source};

/// Below this share of a batch, a claim waits a moment for more room: many small claims cost more than one larger.
const WORTH_CLAIMING: usize = 4;

/// Claims whenever there is room and something may be due, until `stop`.
pub(super) async fn claim<S: Source>(flow: Arc<Flow<S>>, stop: CancellationToken) {
    let (flow, stop) = (&*flow, &stop);
    let mut probes = [].iter();
    let mut pause = Duration::from_millis(20);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = room(flow) => {}
        }
        let asked = Instant::now();
        flow.forget_due(asked);
        let before = flow.clock.now();
        let limit = flow.room().min(flow.options.batch.max(1));
        // Not cut short as long as the drain time lasts: a claim whose answer is thrown away stays claimed until its lease
        // ends.
        let claimed = tokio::select! {
            biased;
            claimed = flow.source.claim(limit) => claimed,
            () = drained(flow, stop) => {
                tracing::warn!(relay = flow.name, "the source did not answer: what it may have claimed ends with its lease");
                return;
            }
        };
        let next_due = match claimed {
            Ok(claim) => {
                pause = Duration::from_millis(20);
                let full = claim.items.len() >= limit;
                if !claim.items.is_empty() {
                    flow.accept(claim.items, deadline(before, flow.source.lease()));
                }
                if full {
                    continue;
                }
                claim.next_due
            }
            Err(error) => {
                tracing::warn!(relay = flow.name, error = error.chain(), "nothing claimed; trying again");
                tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    () = sleep(pause) => {}
                }
                pause = (pause * 2).min(Duration::from_secs(1));
                continue;
            }
        };
        let mut wait = flow.options.poll_interval.min(next_due.unwrap_or(Duration::MAX));
        if let Some(probe) = probes.next() {
            wait = wait.min(*probe);
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            signal = flow.source.wakeup().signalled() => {
                if signal == Signal::Soon {
                    probes = PROBES.iter();
                }
            }
            () = due(flow, asked + wait.clamp(Duration::from_millis(1), LONGEST_WAIT)) => {}
        }
    }
}

/// Waits for the end of the drain time.
async fn drained<S: Source>(flow: &Flow<S>, stop: &CancellationToken) {
    stop.cancelled().await;
    sleep(flow.options.drain).await;
}

/// Waits until something may be claimed, and a moment longer for enough room to make it worth while.
async fn room<S: Source>(flow: &Flow<S>) {
    let worth = (flow.options.batch / WORTH_CLAIMING).min(flow.options.max_in_flight / 2).max(1);
    let mut patience = None;
    loop {
        // Made before looking, so that what is freed in between is not missed.
        let freed = flow.freed.notified();
        let room = flow.room();
        if !flow.backpressure.settling.is_failing() {
            if room >= worth {
                return;
            }
            if room > 0 {
                let until = *patience.get_or_insert_with(|| Instant::now() + flow.options.settle_linger * 2);
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
async fn due<S: Source>(flow: &Flow<S>, at: Instant) {
    loop {
        let until = flow.expected_due().map_or(at, |due| due.min(at));
        tokio::select! {
            biased;
            () = sleep_until(until) => return,
            () = flow.due_moved.notified() => {}
        }
    }
}

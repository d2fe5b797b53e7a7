use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::LONGEST_WAIT;
use super::flow::Flow;
use crate::wakeup::PROBES;
use crate::{Settled, Signal, Source};

/// Below this share of a batch, a claim waits a moment for more room: many small claims cost more than one larger.
const WORTH_CLAIMING: usize = 4;

/// Claims whenever there is room and something may be due, until `stop`.
pub(super) async fn claim<S: Source>(flow: &Flow<S>, stop: &CancellationToken) {
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

/// Keeps the leases of what waits and of what is being delivered.
pub(super) async fn renew<S: Source>(flow: Arc<Flow<S>>, end: CancellationToken) {
    let lease = flow.source.lease();
    let mut next = Instant::now() + lease / 3;
    loop {
        tokio::select! {
            biased;
            () = end.cancelled() => return,
            () = sleep_until(next) => {}
            () = flow.aged.notified() => {}
        }
        // From before it is sent: when the store takes long to answer, the next one is due the sooner.
        next = Instant::now() + lease / 3;
        let before = flow.clock.now();
        let mut held = flow.all_held();
        held.retain(|held| (1..worth_renewing(before, lease)).contains(&held.deadline()));
        if held.is_empty() {
            continue;
        }
        // In the order of their claim, so that a run can be repeated.
        held.sort_unstable_by_key(|held| held.ticket);
        let claims: Vec<_> = held.iter().map(|held| &held.claimed).collect();
        match flow.source.renew(&claims).await {
            Ok(answers) => {
                for (held, answer) in held.iter().zip(&answers) {
                    match answer {
                        Settled::Applied => held.extend(deadline(before, lease)),
                        Settled::LostLease => held.lose(),
                    }
                }
                let lost = held.iter().zip(&answers).filter(|(_, answer)| **answer == Settled::LostLease);
                lost.for_each(|(held, _)| flow.revoke_run(held));
            }
            Err(error) => {
                tracing::warn!(relay = flow.name, error = error.chain(), "leases are not renewed yet; trying again");
                next = Instant::now() + lease / 30;
            }
        }
    }
}

/// Items whose deadline is earlier than this are renewed: they have lost a quarter of their lease.
pub(super) fn worth_renewing(now: u64, lease: Duration) -> u64 {
    deadline(now, lease).saturating_sub(lease.as_micros() as u64 / 4)
}

/// The last moment at which a delivery may start: the lease as seen from before the claim was sent, less a margin for
/// clocks that run at different speeds.
pub(super) fn deadline(before: u64, lease: Duration) -> u64 {
    let margin = (lease / 10).min(Duration::from_secs(1));
    before + (lease - margin).as_micros() as u64
}

/// Waits until something may be claimed, and a moment longer for enough room to make it worth while.
async fn room<S: Source>(flow: &Flow<S>) {
    let worth = (flow.options.batch / WORTH_CLAIMING).min(flow.options.max_in_flight / 2).max(1);
    let mut patience = None;
    loop {
        // Made before looking, so that what is freed in between is not missed.
        let freed = flow.freed.notified();
        let room = flow.room();
        if !flow.troubled.load(Ordering::Acquire) {
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

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::Held;
use super::flow::Flow;
use crate::{Settled, Source};

/// Renews the leases of claimed items, of those that wait and of those that are being delivered, until `end`.
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
        // Counted from before the statement is sent: when the store takes long to answer, the next renewal comes sooner.
        let started = Instant::now();
        next = match renew_all(&flow, lease).await {
            true => started + lease / 3,
            false => Instant::now() + lease / 30,
        };
    }
}

/// Renews everything that has lost a quarter of its lease; false if it has to be tried again soon.
async fn renew_all<S: Source>(flow: &Flow<S>, lease: Duration) -> bool {
    let before = flow.clock.now();
    let mut held = flow.all_held();
    held.retain(|held| (1..worth_renewing(before, lease)).contains(&held.deadline()));
    let statement = &flow.backpressure.renewing;
    if held.is_empty() {
        flow.backpressure.answered(statement, true);
        return true;
    }
    // In the order of their claim, so that a simulated run can be repeated.
    held.sort_unstable_by_key(|held| held.ticket);
    let claims: Vec<_> = held.iter().map(|held| &held.claimed).collect();
    flow.backpressure.sent(statement, before);
    let answers = flow.source.renew(&claims).await;
    match answers {
        Ok(answers) => {
            let all_answered = apply(flow, &held, &answers, deadline(before, lease));
            flow.backpressure.answered(statement, true);
            all_answered
        }
        Err(error) => {
            flow.backpressure.answered(statement, false);
            tracing::warn!(
                relay = flow.name,
                error = error.chain(),
                "failed to renew leases: no new deliveries start until a renewal succeeds"
            );
            false
        }
    }
}

/// False if another transaction has locked one of the rows, so that it has to be renewed later.
fn apply<S: Source>(flow: &Flow<S>, held: &[Arc<Held<S::Item>>], answers: &[Settled], deadline: u64) -> bool {
    let mut all_answered = true;
    for (held, answer) in held.iter().zip(answers) {
        match answer {
            Settled::Applied => held.extend(deadline),
            Settled::LostLease => held.lose(),
            Settled::Locked => all_answered = false,
        }
    }
    let lost = held.iter().zip(answers).filter(|(_, answer)| **answer == Settled::LostLease);
    lost.for_each(|(held, _)| flow.revoke_run(held));
    all_answered
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

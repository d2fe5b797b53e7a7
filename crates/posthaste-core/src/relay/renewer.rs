use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::in_flight::InFlightItem;
use super::shared::Shared;
use crate::{Settled, Source};

/// Renews the leases of all items in flight, waiting or being delivered, until `end`. Releases the waiting items that the
/// source revokes.
pub(super) async fn renew<S: Source>(shared: Arc<Shared<S>>, end: CancellationToken) {
    let lease = shared.source.lease();
    let mut next = Instant::now() + lease / 3;
    loop {
        tokio::select! {
            biased;
            () = end.cancelled() => return,
            () = sleep_until(next) => {}
            () = shared.renew_soon.notified() => {}
            () = shared.source.revoked() => {
                shared.release_revoked();
                continue;
            }
        }
        // Counted from before the statement is sent: when the store takes long to respond, the next renewal comes
        // sooner.
        let started = Instant::now();
        next = match renew_all(&shared, lease).await {
            true => started + lease / 3,
            false => Instant::now() + lease / 30,
        };
    }
}

/// Renews every item that has used a quarter of its lease. False if it has to be tried again soon.
async fn renew_all<S: Source>(shared: &Shared<S>, lease: Duration) -> bool {
    let before = shared.clock.now();
    let mut items = shared.in_flight.all();
    // A deadline of 0 marks a lease that is lost.
    items.retain(|item| (1..worth_renewing(before, lease)).contains(&item.deadline()));
    let statement = &shared.backpressure.renewing;
    if items.is_empty() {
        shared.backpressure.answered(statement, true);
        shared.renewal_answered(before);
        return true;
    }
    // In the order of their claim, so that a simulated run can be repeated.
    items.sort_unstable_by_key(|item| item.number);
    let claims: Vec<_> = items.iter().map(|item| &item.claimed).collect();
    shared.backpressure.sent(statement, before);
    let answers = shared.source.renew(&claims).await;
    match answers {
        Ok(answers) => {
            let all_answered = apply(shared, &items, &answers, deadline(before, lease));
            shared.backpressure.answered(statement, true);
            shared.renewal_answered(before);
            all_answered
        }
        Err(error) => {
            shared.backpressure.answered(statement, false);
            tracing::warn!(
                relay = shared.name,
                error = error.chain(),
                "failed to renew leases: no new deliveries start until a renewal succeeds"
            );
            false
        }
    }
}

/// False if another transaction has locked one of the rows, so that it has to be renewed later.
fn apply<S: Source>(
    shared: &Shared<S>,
    items: &[Arc<InFlightItem<S::Item>>],
    answers: &[Settled],
    deadline: u64,
) -> bool {
    let mut all_answered = true;
    for (item, answer) in items.iter().zip(answers) {
        match answer {
            Settled::Applied => item.extend(deadline),
            Settled::LostLease => item.lose(),
            Settled::Locked => all_answered = false,
        }
    }
    let lost = items.iter().zip(answers).filter(|(_, answer)| **answer == Settled::LostLease);
    lost.for_each(|(item, _)| shared.in_flight.revoke_run(item));
    all_answered
}

/// Items whose deadline is earlier than this are renewed: they have used a quarter of their lease.
pub(super) fn worth_renewing(now: u64, lease: Duration) -> u64 {
    deadline(now, lease).saturating_sub(lease.as_micros() as u64 / 4)
}

/// The last moment at which a delivery may start: a lease after `before`, less a margin for clocks that run at different
/// speeds. `before` is a moment before the claim or the renewal was sent, so the lease cannot end earlier.
pub(super) fn deadline(before: u64, lease: Duration) -> u64 {
    let margin = (lease / 10).min(Duration::from_secs(1));
    before + (lease - margin).as_micros() as u64
}

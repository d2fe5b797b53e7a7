use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::flow::{Decided, Flow, Pile};
use crate::{Disposition, FaultKind, Settled, Settlement, Source, StoreError};

/// Records outcomes in groups, and at the `end` what is left.
pub(super) async fn settle<S: Source>(flow: Arc<Flow<S>>, end: CancellationToken) {
    let mut patience = Instant::now();
    while !end.is_cancelled() {
        tokio::select! {
            biased;
            () = end.cancelled() => {}
            () = gather(&flow) => {}
        }
        flush(&flow, &mut patience, &end).await;
    }
    flush(&flow, &mut patience, &end).await;
}

/// Records everything on the pile; returns when it is empty. What nobody waits for stays there until `patience` ends, so
/// that many writers at once make few statements, or until the `end`.
async fn flush<S: Source>(flow: &Flow<S>, patience: &mut Instant, end: &CancellationToken) {
    loop {
        while !end.is_cancelled() && flow.nobody_waits() {
            tokio::select! {
                biased;
                () = end.cancelled() => {}
                () = sleep_until(*patience) => break,
                () = flow.piled.notified() => {}
            }
        }
        flow.urgent.store(false, Ordering::Release);
        let pile = flow.take_pile();
        if pile.is_empty() {
            return;
        }
        *patience = Instant::now() + flow.options.settle_linger;
        record(flow, pile).await;
    }
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

/// How often the outcome of one item is told that the store refuses, before it is left to the end of its lease.
const REFUSALS: u32 = 10;

/// Tries until the store answers. Meanwhile nothing is claimed: what is known must be on record first.
async fn record<S: Source>(flow: &Flow<S>, pile: Pile<S::Item>) {
    if !pile.decided.is_empty() {
        record_decided(flow, &pile.decided).await;
    }
    if !pile.released.is_empty() {
        let released: Vec<_> = pile.released.iter().map(|held| &held.claimed).collect();
        let mut pause = Pause::default();
        while let Err(error) = flow.source.release(&released).await {
            pause.after(flow, &error).await;
        }
        flow.expect_due(Duration::ZERO);
    }
    flow.troubled.store(false, Ordering::Release);
    flow.forget(pile.decided.iter().map(|decided| &decided.held).chain(&pile.released));
}

/// What the store refuses for good is recorded one by one, so that one item that cannot be recorded does not keep the
/// others from it.
async fn record_decided<S: Source>(flow: &Flow<S>, decided: &[Decided<S::Item>]) {
    if let [one] = decided {
        return record_one(flow, one).await;
    }
    let mut pause = Pause::default();
    while let Err(error) = settle_some(flow, decided).await {
        pause.after(flow, &error).await;
        if error.kind() != FaultKind::Lasting {
            continue;
        }
        let mut refused = Vec::new();
        for one in decided {
            if settle_some(flow, std::slice::from_ref(one)).await.is_err() {
                refused.push(one);
            }
        }
        // Where it refuses all of them it is no item's fault: somebody has to mend the store.
        if refused.len() < decided.len() {
            for one in refused {
                record_one(flow, one).await;
            }
            return;
        }
    }
}

/// Tries until the store answers, or has refused it too often.
async fn record_one<S: Source>(flow: &Flow<S>, one: &Decided<S::Item>) {
    let mut pause = Pause::default();
    while let Err(error) = settle_some(flow, std::slice::from_ref(one)).await {
        pause.after(flow, &error).await;
        if error.kind() == FaultKind::Lasting && pause.times >= REFUSALS {
            return leave_to_its_lease(flow, &error);
        }
    }
}

fn leave_to_its_lease<S: Source>(flow: &Flow<S>, error: &StoreError) {
    flow.meters.lost(1);
    tracing::error!(
        relay = flow.name,
        error = error.chain(),
        "an outcome cannot be recorded: the item will come again"
    );
}

async fn settle_some<S: Source>(flow: &Flow<S>, decided: &[Decided<S::Item>]) -> Result<(), StoreError> {
    let settlements = decided.iter().map(|decided| Settlement {
        claimed: &decided.held.claimed,
        disposition: &decided.disposition,
        took: decided.took,
    });
    let settlements: Vec<_> = settlements.collect();
    let settled = flow.source.settle(&settlements).await?;
    for (decided, settled) in decided.iter().zip(settled) {
        flow.meters.settled(&decided.disposition, settled, decided.took);
        if settled == Settled::LostLease {
            flow.revoke_run(&decided.held);
        }
        if let Disposition::Retry { after, .. } = decided.disposition {
            flow.expect_due(after);
        }
    }
    Ok(())
}

/// Longer and longer waits between attempts to record something.
#[derive(Default)]
struct Pause {
    times: u32,
}

impl Pause {
    async fn after<S: Source>(&mut self, flow: &Flow<S>, error: &StoreError) {
        flow.troubled.store(true, Ordering::Release);
        tracing::warn!(relay = flow.name, error = error.chain(), "outcomes are not recorded yet; trying again");
        sleep(Duration::from_millis(20 << self.times.min(6)).min(Duration::from_secs(1))).await;
        self.times += 1;
    }
}

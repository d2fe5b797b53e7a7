use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::flow::{Flow, Pile};
use crate::{Disposition, Settled, Settlement, Source, StoreError};

/// Records outcomes in groups, and at the `end` what is left.
pub(super) async fn settle<S: Source>(flow: Arc<Flow<S>>, end: CancellationToken) {
    while !end.is_cancelled() {
        tokio::select! {
            biased;
            () = end.cancelled() => {}
            () = gather(&flow) => {}
        }
        flush(&flow).await;
    }
    flush(&flow).await;
}

/// Records everything on the pile; returns when it is empty.
async fn flush<S: Source>(flow: &Flow<S>) {
    loop {
        let pile = flow.take_pile();
        if pile.is_empty() {
            return;
        }
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

/// Tries until the store answers. Meanwhile nothing is claimed: what is known must be on record first.
async fn record<S: Source>(flow: &Flow<S>, pile: Pile<S::Item>) {
    let mut pause = Duration::from_millis(20);
    while let Err(error) = try_record(flow, &pile).await {
        flow.troubled.store(true, Ordering::Release);
        tracing::warn!(relay = flow.name, error = error.chain(), "outcomes are not recorded yet; trying again");
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
    flow.troubled.store(false, Ordering::Release);
    flow.forget(pile.decided.iter().map(|decided| &decided.held).chain(&pile.released));
}

async fn try_record<S: Source>(flow: &Flow<S>, pile: &Pile<S::Item>) -> Result<(), StoreError> {
    if !pile.decided.is_empty() {
        let settlements: Vec<_> = pile
            .decided
            .iter()
            .map(|decided| Settlement {
                claimed: &decided.held.claimed,
                disposition: &decided.disposition,
                took: decided.took,
            })
            .collect();
        let settled = flow.source.settle(&settlements).await?;
        for (decided, settled) in pile.decided.iter().zip(settled) {
            flow.meters.settled(&decided.disposition, settled, decided.took);
            if settled == Settled::LostLease {
                flow.revoke_run(&decided.held);
            }
            if let Disposition::Retry { after, .. } = decided.disposition {
                flow.expect_due(after);
            }
        }
    }
    if !pile.released.is_empty() {
        let released: Vec<_> = pile.released.iter().map(|held| &held.claimed).collect();
        flow.source.release(&released).await?;
        flow.expect_due(Duration::ZERO);
    }
    Ok(())
}

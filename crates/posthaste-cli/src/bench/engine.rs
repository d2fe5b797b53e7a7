use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_core::{
    Claim, Claimed, Delivery, Relay, RelayOptions, Settled, Settlement, Sink, Source, StoreError, Wakeup,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Figure, rate};

/// The engine between a source that only counts and a sink that does nothing.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let count = if quick { 300_000 } else { 3_000_000 };
    let raw = by_channel(count).await?;
    let ours = by_relay(count).await?;
    let figure = Figure::new("engine", "events through one worker, one at a time", ours, "events/s");
    Ok(vec![figure.at_least(500_000.0).raw("numbers over a channel to one task", raw)])
}

async fn by_relay(count: usize) -> anyhow::Result<f64> {
    let source = Arc::new(Numbers::new(count));
    let options = RelayOptions { workers: 1, ..RelayOptions::default() };
    let stop = CancellationToken::new();
    let started = Instant::now();
    let relay = Relay::new("bench", source.clone(), Arc::new(NoopSink), options).run(stop.clone());
    let relay = tokio::spawn(relay);
    source.all_settled.notified().await;
    let took = started.elapsed();
    stop.cancel();
    relay.await?;
    Ok(rate(count, took))
}

/// The simplest way from one task to another.
async fn by_channel(count: usize) -> anyhow::Result<f64> {
    let (sender, mut receiver) = tokio::sync::mpsc::channel(2_000);
    let started = Instant::now();
    let worker = tokio::spawn(async move {
        let mut received = 0;
        while let Some(number) = receiver.recv().await {
            std::hint::black_box::<usize>(number);
            received += 1;
        }
        received
    });
    for number in 0..count {
        sender.send(number).await?;
    }
    drop(sender);
    anyhow::ensure!(worker.await? == count, "the channel lost a number");
    Ok(rate(count, started.elapsed()))
}

/// A source of consecutive numbers.
struct Numbers {
    count: usize,
    claimed: AtomicUsize,
    settled: AtomicUsize,
    all_settled: Notify,
    wakeup: Wakeup,
}

impl Numbers {
    fn new(count: usize) -> Self {
        Self {
            count,
            claimed: AtomicUsize::new(0),
            settled: AtomicUsize::new(0),
            all_settled: Notify::new(),
            wakeup: Wakeup::default(),
        }
    }
}

#[async_trait]
impl Source for Numbers {
    type Item = usize;

    async fn claim(&self, limit: usize) -> Result<Claim<usize>, StoreError> {
        let from = self.claimed.fetch_add(limit, Ordering::Relaxed).min(self.count);
        let to = (from + limit).min(self.count);
        Ok(Claim { items: (from..to).map(|number| Claimed::new(number, 1, 300)).collect(), next_due: None })
    }

    async fn settle(&self, settlements: &[Settlement<'_, usize>]) -> Result<Vec<Settled>, StoreError> {
        let settled = self.settled.fetch_add(settlements.len(), Ordering::Relaxed) + settlements.len();
        if settled == self.count {
            self.all_settled.notify_one();
        }
        Ok(vec![Settled::Applied; settlements.len()])
    }

    async fn renew(&self, claimed: &[&Claimed<usize>]) -> Result<Vec<Settled>, StoreError> {
        Ok(vec![Settled::Applied; claimed.len()])
    }

    async fn release(&self, _: &[&Claimed<usize>]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn renews_on_own_thread(&self) -> bool {
        false
    }

    fn lease(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }

    fn may_start(&self, _: &Claimed<usize>) -> bool {
        true
    }

    async fn revoked(&self) {
        std::future::pending().await
    }
}

/// A sink that reports every delivery as done.
struct NoopSink;

#[async_trait]
impl Sink for NoopSink {
    type Item = usize;

    async fn deliver(&self, batch: Vec<Delivery<usize>>) {
        batch.into_iter().for_each(|delivery| delivery.report(()));
    }
}

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use posthaste_core::bus::{Bus, PublishError, Record};
use posthaste_core::lock;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Address;

/// So many records are published at once, and so long is the pause afterwards.
const BATCH: u32 = 6;
const PAUSE: Duration = Duration::from_millis(20);

/// The numbers of the records that the bus has accepted.
type Accepted = Arc<Mutex<BTreeSet<u32>>>;

/// Publishes numbered records until it is stopped. It publishes a record again until the bus accepts it.
pub(super) struct Publisher {
    accepted: Accepted,
    stop: CancellationToken,
    publishing: JoinHandle<()>,
}

impl Publisher {
    pub(super) fn start(bus: Arc<dyn Bus>, address: &Address) -> Self {
        let (accepted, stop) = (Accepted::default(), CancellationToken::new());
        let publishing = tokio::spawn(publish(bus, address.topic(), Arc::clone(&accepted), stop.clone()));
        Self { accepted, stop, publishing }
    }

    /// How many records the bus has accepted so far.
    pub(super) fn accepted(&self) -> usize {
        lock(&self.accepted).len()
    }

    /// Stops when every record is accepted. Returns their numbers, which are all that were ever published.
    pub(super) async fn stop(self) -> BTreeSet<u32> {
        self.stop.cancel();
        self.publishing.await.expect("the publisher does not panic");
        std::mem::take(&mut *lock(&self.accepted))
    }
}

/// The record with this number. Its partition depends on the route.
pub(super) fn record(topic: &str, route: u64, key: String) -> Record {
    Record { topic: topic.into(), route, value: Bytes::from(key.clone()), key, headers: Vec::new() }
}

async fn publish(bus: Arc<dyn Bus>, topic: String, accepted: Accepted, stop: CancellationToken) {
    let mut next = 0;
    while !stop.is_cancelled() {
        let mut numbers: Vec<u32> = (next..next + BATCH).collect();
        next += BATCH;
        while !numbers.is_empty() {
            let records = numbers.iter().map(|number| record(&topic, u64::from(*number), number.to_string()));
            let results = bus.publish(records.collect()).await;
            let mut left = Vec::new();
            for (number, result) in numbers.into_iter().zip(results) {
                match result {
                    Ok(()) => _ = lock(&accepted).insert(number),
                    Err(PublishError::Unavailable(_)) => left.push(number),
                    Err(error @ PublishError::Refused { .. }) => panic!("record {number}: {error}"),
                }
            }
            numbers = left;
            tokio::time::sleep(PAUSE).await;
        }
    }
}

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use posthaste_core::bus::{Bus, Topics};
use tokio::time::timeout;

use super::member::number;
use super::publisher::record;
use super::{Address, PARTITIONS, Place};
use crate::processes::PATIENCE;

/// The key of the last record of each partition.
const LAST: &str = "last";

/// Reads with a new consumer what the group has not acked. Returns the number of each record by its place.
pub(super) async fn read_rest(bus: &dyn Bus, address: &Address) -> BTreeMap<Place, u32> {
    // Records of a partition are read in their order. So nothing comes after these records.
    let last = (0..u64::from(PARTITIONS)).map(|route| record(&address.topic(), route, LAST.to_owned()));
    for result in bus.publish(last.collect()).await {
        result.expect("the server is up");
    }
    let consumer = bus.subscribe(&address.group(), Topics::Named(vec![address.topic()])).await.expect("a new consumer");
    let (mut rest, mut ended) = (BTreeMap::new(), 0);
    let deadline = Instant::now() + PATIENCE;
    while ended < PARTITIONS {
        assert!(Instant::now() < deadline, "{ended} of {PARTITIONS} partitions were read to the end");
        let fetched = consumer.fetch(500).await.expect("the server is up");
        if fetched.is_empty() {
            // Nothing is there yet. The wake-up may have been for records that were fetched already.
            let _ = timeout(Duration::from_millis(50), consumer.wakeup().signalled()).await;
        }
        for fetched in fetched {
            match &*fetched.key {
                LAST => ended += 1,
                _ => _ = rest.insert(Place::of(&fetched.position), number(&fetched)),
            }
        }
    }
    consumer.close().await.expect("the server is up");
    rest
}

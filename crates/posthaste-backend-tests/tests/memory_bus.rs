//! The laws of the bus on the in-memory bus, which tests both the bus and the suite.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_backend_tests::MemoryBus;
use posthaste_backend_tests::bus_laws::{BusHarness, LEASE};
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Record, Topics};
use posthaste_core::log::LogOptions;

struct Memory {
    bus: MemoryBus,
    partitions: u32,
}

impl Memory {
    fn new(partitions: u32) -> Self {
        Self { bus: MemoryBus::new(partitions, LEASE), partitions }
    }
}

#[async_trait]
impl BusHarness for Memory {
    type Bus = MemoryBus;

    async fn open_with(&self, lease: Duration) -> MemoryBus {
        self.bus.another(LogOptions { partitions: self.partitions, lease, ..LogOptions::default() })
    }

    async fn remove_below(&self, topic: &str, offset: i64) {
        self.bus.remove_below(topic, offset);
    }

    async fn reset(&self, group: &str, topic: &str) {
        self.bus.reset(group, topic);
    }

    fn max_completed_text(&self) -> usize {
        posthaste_core::log::MAX_COMPLETED_TEXT
    }
}

mod with_one_partition {
    posthaste_backend_tests::bus_laws!(super::Memory::new(1));
}

mod with_four_partitions {
    posthaste_backend_tests::bus_laws!(super::Memory::new(4));
}

#[tokio::test]
async fn a_partition_is_not_lost_after_an_ack_whose_answer_was_lost() {
    let bus = MemoryBus::new(1, LEASE);
    let record = |number: u32| Record {
        topic: "orders".into(),
        route: 0,
        key: number.to_string(),
        value: Bytes::new(),
        headers: Vec::new(),
    };
    assert!(bus.publish((0..3).map(record).collect()).await.iter().all(Result::is_ok));
    let consumer = bus.subscribe("readers", Topics::Named(vec!["orders".to_owned()])).await.unwrap();
    let fetched = consumer.fetch(10).await.unwrap();
    let [first, second, third] = &fetched[..] else { panic!("{fetched:?}") };
    bus.lose_next_answer();
    assert!(consumer.ack(&[&first.position]).await.is_err());
    for record in [third, first, second] {
        assert_eq!(consumer.ack(&[&record.position]).await.unwrap(), [Settled::Applied], "{}", record.key);
    }
    consumer.close().await.unwrap();
    let next = bus.subscribe("readers", Topics::Named(vec!["orders".to_owned()])).await.unwrap();
    assert!(next.fetch(10).await.unwrap().is_empty(), "all is done");
}

//! The laws of the bus on the in-memory bus, which tests both the bus and the suite.

use std::time::Duration;

use async_trait::async_trait;
use posthaste_backend_tests::MemoryBus;
use posthaste_backend_tests::bus_laws::{BusHarness, LEASE};
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

//! The laws of the bus on the in-memory bus, which tests both the bus and the suite.

use async_trait::async_trait;
use posthaste_backend_tests::MemoryBus;
use posthaste_backend_tests::bus_laws::{BusHarness, LEASE};

struct Memory(MemoryBus);

#[async_trait]
impl BusHarness for Memory {
    type Bus = MemoryBus;

    async fn open(&self) -> MemoryBus {
        self.0.clone()
    }
}

mod with_one_partition {
    posthaste_backend_tests::bus_laws!(super::Memory(super::MemoryBus::new(1, super::LEASE)));
}

mod with_four_partitions {
    posthaste_backend_tests::bus_laws!(super::Memory(super::MemoryBus::new(4, super::LEASE)));
}

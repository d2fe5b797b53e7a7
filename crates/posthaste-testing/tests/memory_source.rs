//! The laws of a source, on the one in memory.

use std::time::Duration;

use async_trait::async_trait;
use posthaste_testing::source_laws::{KeyedSourceHarness, SourceHarness};
use posthaste_testing::{MemoryItem, MemorySource, MemoryStore, keyed_source_laws, source_laws};

struct Harness(MemoryStore<String>);

impl Harness {
    async fn start(lease: Duration) -> Self {
        Self(MemoryStore::new(lease))
    }
}

#[async_trait]
impl SourceHarness for Harness {
    type Source = MemorySource<String>;

    async fn open(&self) -> MemorySource<String> {
        self.0.source()
    }

    async fn insert(&self, label: &str, delay: Duration) {
        self.0.insert(label.to_owned(), None, delay);
    }

    fn label(&self, item: &MemoryItem<String>) -> String {
        item.item.to_string()
    }
}

#[async_trait]
impl KeyedSourceHarness for Harness {
    async fn insert_keyed(&self, label: &str, key: &str) {
        self.0.insert(label.to_owned(), Some(key), Duration::ZERO);
    }
}

source_laws!(Harness::start);
keyed_source_laws!(Harness::start);

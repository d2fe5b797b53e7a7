//! The laws of a source on the in-memory outbox, in each mode.

use std::time::Duration;

use async_trait::async_trait;
use posthaste_backend_tests::source_laws::{KeyedSourceHarness, SourceHarness};
use posthaste_core::Event;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OutboxItem, OutboxSource, Pool, Reader, Table, TableName};
use posthaste_testing::{MemoryDatabase, MemoryOutbox};

struct Harness {
    database: MemoryDatabase,
    reader: Reader,
    mode: Mode,
    lease: Duration,
}

impl Harness {
    async fn start(reader: Reader, mode: Mode, lease: Duration) -> Self {
        Self { database: MemoryDatabase::new(), reader, mode, lease }
    }

    async fn store(&self) -> MemoryOutbox {
        self.database.open(TableName::default(), self.mode).await.unwrap()
    }

    async fn write(&self, event: Event) {
        let store = self.store().await;
        let mut transaction = store.begin().await.unwrap();
        store.insert(&mut transaction, &[&event], None).await.unwrap();
        transaction.commit().await.unwrap();
    }
}

#[async_trait]
impl SourceHarness for Harness {
    type Source = OutboxSource<MemoryOutbox>;

    async fn open(&self) -> Self::Source {
        let table = Table::open(self.store().await, self.reader, self.lease).await.unwrap();
        match self.reader {
            Reader::Dispatcher => table.dispatcher_source(),
            Reader::Channels => table.channel_source("law"),
        }
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let delay = (!delay.is_zero()).then_some(delay);
        self.write(Event::text("law", label).deliver_after(delay).build().unwrap()).await;
    }

    fn label(&self, item: &OutboxItem) -> String {
        String::from_utf8(item.event.payload().as_bytes().to_vec()).unwrap()
    }
}

#[async_trait]
impl KeyedSourceHarness for Harness {
    async fn insert_keyed(&self, label: &str, key: &str) {
        self.write(Event::text("law", label).aggregate("thing", key).build().unwrap()).await;
    }
}

mod dispatcher_of_one_node {
    use super::*;

    posthaste_backend_tests::source_laws!(|lease| Harness::start(Reader::Dispatcher, Mode::SingleNode, lease));
}

mod channel_of_many_nodes {
    use super::*;

    posthaste_backend_tests::source_laws!(|lease| Harness::start(Reader::Channels, Mode::MultiNode, lease));
}

mod in_order {
    use super::*;

    posthaste_backend_tests::source_laws!(|lease| Harness::start(Reader::Dispatcher, Mode::ORDERED, lease));
    posthaste_backend_tests::keyed_source_laws!(|lease| Harness::start(Reader::Dispatcher, Mode::ORDERED, lease));
}

//! The laws of a source on the outbox of every database, for each kind of reader and mode. The tests of the in-memory
//! store are in `posthaste-backend-tests`.

use std::time::Duration;

use async_trait::async_trait;
use posthaste::{Event, Mode};
use posthaste_backend_tests::source_laws::{KeyedSourceHarness, SourceHarness};
use posthaste_core::outbox::{OutboxItem, OutboxSource, Reader, Table};

use crate::harness::{Harness, table_of, write_to};

struct Outboxes<H: Harness> {
    db: H,
    reader: Reader,
    mode: Mode,
    lease: Duration,
    writer: Table<H::Store>,
}

impl<H: Harness> Outboxes<H> {
    async fn start(reader: Reader, mode: Mode, lease: Duration) -> Self {
        let db = H::start().await;
        let writer = table_of(&db, reader, mode, lease).await;
        Self { db, reader, mode, lease, writer }
    }
}

#[async_trait]
impl<H: Harness> SourceHarness for Outboxes<H> {
    type Source = OutboxSource<H::Store>;

    async fn open(&self) -> OutboxSource<H::Store> {
        let table = table_of(&self.db, self.reader, self.mode, self.lease).await;
        match self.reader {
            Reader::Dispatcher => table.dispatcher_source(),
            Reader::Channels => table.channel_source("law"),
        }
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let delay = (!delay.is_zero()).then_some(delay);
        write_to(&self.writer, &[Event::text("law", label).deliver_after(delay).build().unwrap()]).await;
    }

    fn label(&self, item: &OutboxItem) -> String {
        String::from_utf8(item.event.payload().as_bytes().to_vec()).unwrap()
    }
}

#[async_trait]
impl<H: Harness> KeyedSourceHarness for Outboxes<H> {
    async fn insert_keyed(&self, label: &str, key: &str) {
        write_to(&self.writer, &[Event::text("law", label).aggregate("aggregate", key).build().unwrap()]).await;
    }
}

/// Declares the laws for one database.
macro_rules! laws_on {
    ($module:ident, $harness:ident) => {
        mod $module {
            laws_on!($harness, source_laws: dispatcher_of_one_node, Dispatcher, SingleNode);
            laws_on!($harness, source_laws: dispatcher_of_many_nodes, Dispatcher, MultiNode);
            laws_on!($harness, source_laws: dispatcher_in_order, Dispatcher, ORDERED);
            laws_on!($harness, keyed_source_laws: keys_in_order, Dispatcher, ORDERED);
            laws_on!($harness, source_laws: channel_of_one_node, Channels, SingleNode);
            laws_on!($harness, source_laws: channel_of_many_nodes, Channels, MultiNode);
        }
    };
    ($harness:ident, $laws:ident: $module:ident, $reader:ident, $mode:ident) => {
        mod $module {
            use posthaste::Mode;
            use posthaste_core::outbox::Reader;

            use crate::harness::$harness;
            use crate::laws::Outboxes;

            posthaste_backend_tests::$laws!(|lease| Outboxes::<$harness>::start(Reader::$reader, Mode::$mode, lease));
        }
    };
}

laws_on!(postgres, Postgres);
laws_on!(mysql, MySql);
laws_on!(sqlite, Sqlite);

use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{Mode, OutboxItem, Reader};
use posthaste_core::{Event, Source};
use posthaste_sql::letters::Letter;
use posthaste_sql::sqlite::Letters;
use posthaste_testing::source_laws::{KeyedSourceHarness, SourceHarness};

use crate::support::{File, Outbox, OutboxSource, letter};

struct OutboxHarness {
    file: File,
    reader: Reader,
    mode: Mode,
    lease: Duration,
    writer: Outbox,
}

impl OutboxHarness {
    async fn start(reader: Reader, mode: Mode, lease: Duration) -> Self {
        let file = File::new();
        let writer = file.outbox(reader, mode, lease).await;
        Self { file, reader, mode, lease, writer }
    }
}

#[async_trait]
impl SourceHarness for OutboxHarness {
    type Source = OutboxSource;

    async fn open(&self) -> OutboxSource {
        let outbox = self.file.outbox(self.reader, self.mode, self.lease).await;
        match self.reader {
            Reader::Dispatcher => outbox.dispatcher_source(),
            Reader::Channels => outbox.channel_source("law"),
        }
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let delay = (!delay.is_zero()).then_some(delay);
        let event = Event::builder("law").text(label.to_owned()).deliver_after(delay).build().unwrap();
        self.writer.ingest(vec![event.into()]).await.unwrap();
    }

    fn label(&self, item: &OutboxItem) -> String {
        String::from_utf8(item.event.payload().as_bytes().to_vec()).unwrap()
    }
}

#[async_trait]
impl KeyedSourceHarness for OutboxHarness {
    async fn insert_keyed(&self, label: &str, key: &str) {
        let event = Event::text("law", label).aggregate("aggregate", key).build().unwrap();
        self.writer.ingest(vec![event.into()]).await.unwrap();
    }
}

struct LettersHarness {
    file: File,
    lease: Duration,
    writer: Letters,
}

impl LettersHarness {
    async fn start(lease: Duration) -> Self {
        let file = File::new();
        let database = file.open().await;
        database.migrate_hub().await.unwrap();
        Self { file, lease, writer: Letters::new(database, lease) }
    }
}

#[async_trait]
impl SourceHarness for LettersHarness {
    type Source = Letters;

    async fn open(&self) -> Letters {
        Letters::new(self.file.open().await, self.lease)
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let mut letter = letter(label);
        letter.first_delay = delay;
        self.writer.intake(vec![letter]).await.unwrap();
    }

    fn label(&self, item: &<Letters as Source>::Item) -> String {
        let Letter { event_id, .. } = item;
        event_id.trim_start_matches("event-").to_owned()
    }
}

mod dispatcher_in_order {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(Reader::Dispatcher, Mode::ORDERED, lease));
    posthaste_testing::keyed_source_laws!(|lease| OutboxHarness::start(Reader::Dispatcher, Mode::ORDERED, lease));
}

mod dispatcher_of_one_node {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(Reader::Dispatcher, Mode::SingleNode, lease));
}

mod channel_of_one_node {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(Reader::Channels, Mode::SingleNode, lease));
}

mod dispatcher_of_many_nodes {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(Reader::Dispatcher, Mode::MultiNode, lease));
}

mod channel_of_many_nodes {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(Reader::Channels, Mode::MultiNode, lease));
}

mod letters {
    posthaste_testing::source_laws!(super::LettersHarness::start);
}

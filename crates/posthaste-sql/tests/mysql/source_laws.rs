use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::Event;
use posthaste_core::outbox::{DeadHead, Mode, OutboxItem, Reader};
use posthaste_testing::source_laws::{KeyedSourceHarness, SourceHarness};

use crate::support::{MySql, Outbox, OutboxSource};

struct OutboxHarness {
    mysql: MySql,
    reader: Reader,
    mode: Mode,
    lease: Duration,
    writer: Outbox,
}

impl OutboxHarness {
    async fn start(reader: Reader, mode: Mode, lease: Duration) -> Self {
        let mysql = MySql::start().await;
        let writer = mysql.outbox(reader, mode, lease).await;
        Self { mysql, reader, mode, lease, writer }
    }
}

#[async_trait]
impl SourceHarness for OutboxHarness {
    type Source = OutboxSource;

    async fn open(&self) -> OutboxSource {
        let outbox = self.mysql.outbox(self.reader, self.mode, self.lease).await;
        match self.reader {
            Reader::Dispatcher => outbox.dispatcher_source(),
            Reader::Channels => outbox.channel_source("law"),
        }
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let delay = (!delay.is_zero()).then_some(delay);
        let event = Event::builder("law").text(label.to_owned()).deliver_after(delay).build().unwrap();
        self.mysql.write(&self.writer, &[event]).await;
    }

    fn label(&self, item: &OutboxItem) -> String {
        String::from_utf8(item.event.payload().as_bytes().to_vec()).unwrap()
    }
}

#[async_trait]
impl KeyedSourceHarness for OutboxHarness {
    async fn insert_keyed(&self, label: &str, key: &str) {
        let event = Event::text("law", label).aggregate("aggregate", key).build().unwrap();
        self.mysql.write(&self.writer, &[event]).await;
    }
}

mod dispatcher_in_order {
    use super::*;

    posthaste_testing::source_laws!(|lease| OutboxHarness::start(
        Reader::Dispatcher,
        Mode::Ordered(DeadHead::Block),
        lease
    ));
    posthaste_testing::keyed_source_laws!(|lease| OutboxHarness::start(
        Reader::Dispatcher,
        Mode::Ordered(DeadHead::Block),
        lease
    ));
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

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use posthaste_core::{Claimed, Disposition, Event, Settled, Settlement, Source};
use posthaste_sql::TableName;
use posthaste_sql::letters::NewLetter;
use posthaste_sql::sqlite::{Database, Outbox, Reader};
use tempfile::TempDir;

/// Long enough that no lease ends by chance.
pub const LEASE: Duration = Duration::from_secs(120);

/// A database file that goes when the test ends.
pub struct File(TempDir);

impl File {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// The file as another process would see it: connections of its own.
    pub async fn open(&self) -> Database {
        Database::open(&format!("sqlite://{}/test.db", self.0.path().display())).await.unwrap()
    }

    pub async fn outbox(&self, reader: Reader, lease: Duration) -> Outbox {
        Outbox::open(self.open().await, TableName::default(), reader, lease).await.unwrap()
    }

    pub async fn dispatcher(&self) -> (Database, Outbox) {
        let database = self.open().await;
        let outbox = Outbox::open(database.clone(), TableName::default(), Reader::Dispatcher, LEASE).await.unwrap();
        (database, outbox)
    }
}

pub fn event(id: &str, event_type: &str, payload: &str) -> Arc<Event> {
    Arc::new(Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap())
}

/// Runs plain SQL as any other program would.
pub async fn execute(database: &Database, sql: &'static str) {
    try_execute(database, sql).await.unwrap();
}

pub async fn try_execute(database: &Database, sql: &'static str) -> Result<(), posthaste_core::StoreError> {
    let write = database.write("run a test's statement", move |connection| {
        Box::pin(async move { sqlx::raw_sql(sql).execute(connection).await.map(|_| ()) })
    });
    write.await
}

pub async fn settle<S: Source>(source: &S, claimed: &Claimed<S::Item>, disposition: Disposition) -> Settled {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(12) };
    source.settle(&[settlement]).await.unwrap()[0]
}

pub fn letter(delivery_id: &str) -> NewLetter {
    NewLetter {
        delivery_id: delivery_id.to_owned(),
        event_id: format!("event-{delivery_id}"),
        subscription_id: "subscription".to_owned(),
        subscriber_id: "billing".to_owned(),
        event_type: "order.placed".to_owned(),
        domain: "organization".to_owned(),
        endpoint: "https://billing.example/hook".to_owned(),
        envelope: Bytes::from_static(b"\x00envelope"),
        readable: format!("{{\"delivery\":\"{delivery_id}\"}}"),
        attempts: 4,
        error: "HTTP 503 from the endpoint".to_owned(),
        error_code: "503".to_owned(),
        error_cause: None,
        first_failed_at: chrono::DateTime::from_timestamp_millis(1_750_000_000_000).unwrap(),
        first_delay: Duration::ZERO,
    }
}

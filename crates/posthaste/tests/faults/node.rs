//! A service that writes events in its transactions and delivers them. It keeps a diary in a file, which survives a
//! kill.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use posthaste::{DatabaseKind, Event, FaultKind, Mode, Outbox, Pool, RetryPolicy, Settings};
use posthaste_backend_tests::processes::{self, Diary, now_millis, until_stopped};
use posthaste_core::outbox::Store;
use serde::{Deserialize, Serialize};

/// The task of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Role {
    pub url: String,
    pub mode: Mode,
    /// The file that gets one line per entry.
    pub diary: PathBuf,
    /// The duration of a delivery.
    pub work: Duration,
    pub lease: Duration,
    /// The node writes at most this many events, then it only delivers.
    pub writes: u32,
    /// The node stops writing once this file exists.
    pub enough: PathBuf,
    /// The number of aggregates that the events belong to.
    pub keys: u32,
    /// Distinguishes the events of this node from those of others.
    pub name: String,
}

/// One line of a diary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Entry {
    /// The commit succeeded.
    Committed { id: String },
    /// The commit failed with an unknown outcome: it may have happened.
    Unknown { id: String },
    /// The transaction was rolled back, or the database refused the commit.
    RolledBack { id: String },
    /// A listener was called.
    Started { id: String, key: u32, number: u32, at: u64 },
    /// A listener is about to succeed.
    Ended { id: String, at: u64 },
    /// Everything is written.
    Written,
}

impl Entry {
    /// The event of the entry.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Committed { id }
            | Self::Unknown { id }
            | Self::RolledBack { id }
            | Self::Started { id, .. }
            | Self::Ended { id, .. } => Some(id),
            Self::Written => None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Order {
    key: u32,
    number: u32,
}

impl processes::Role for Role {
    const TEST: &'static str = "serve_when_started_as_a_node";
    type Entry = Entry;

    fn diary(&self) -> &Path {
        &self.diary
    }
}

/// Runs until stdin ends, then closes the outbox.
pub fn serve(role: Role) {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        match DatabaseKind::of_url(&role.url).expect("a known database") {
            DatabaseKind::Postgres => {
                let pool = sqlx::postgres::PgPoolOptions::new().max_connections(5).connect_lazy(&role.url);
                run(pool.expect("a URL"), role).await;
            }
            DatabaseKind::MySql => {
                let pool = sqlx::mysql::MySqlPoolOptions::new().max_connections(5).connect_lazy(&role.url);
                run(pool.expect("a URL"), role).await;
            }
            DatabaseKind::Sqlite => {
                let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(3).connect_lazy(&role.url);
                run(pool.expect("a URL"), role).await;
            }
        }
    });
}

async fn run<S: Store>(pool: impl Pool<S>, role: Role) {
    let diary = Diary::open(&role);
    let (seen, work) = (diary.clone(), role.work);
    // The rows of a killed node are suspects and are delivered in small groups. Short queues keep their number small,
    // so that a test need not wait for many.
    let settings = Settings { hot_queue: 100, cold_queue: 100, ..Settings::default() };
    let builder = Outbox::new(pool)
        .settings(settings)
        .mode(role.mode)
        .lease(role.lease)
        .poll_interval(Duration::from_millis(200));
    let builder = builder.retry(RetryPolicy::Fixed { interval: Duration::from_millis(50), max_attempts: Some(1_000) });
    let builder = builder.listen_aggregate("key", "order", move |order: Order, event: Arc<Event>| {
        let diary = seen.clone();
        async move {
            let (id, Order { key, number }) = (event.id().to_owned(), order);
            diary.write(&Entry::Started { id: id.clone(), key, number, at: now_millis() });
            tokio::time::sleep(work).await;
            diary.write(&Entry::Ended { id, at: now_millis() });
        }
    });
    let outbox = builder.start().await.expect("the outbox starts");
    let writing = tokio::spawn(write(outbox.clone(), role, diary));
    until_stopped().await;
    writing.abort();
    outbox.close().await;
}

/// Writes events and rolls back every tenth.
async fn write<S: Store>(outbox: Outbox<S>, role: Role, diary: Diary<Entry>) {
    for number in 0..role.writes {
        if role.enough.exists() {
            break;
        }
        let key = number % role.keys.max(1);
        let event = Event::json("order", &Order { key, number }).expect("JSON").aggregate("key", key);
        let event = event.header("writer", &role.name).build().expect("an event");
        let id = event.id().to_owned();
        let Ok(mut transaction) = outbox.begin().await else {
            // The database is out of reach: the service does not accept this order.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        if outbox.write(&mut transaction, event).await.is_err() || number % 10 == 9 {
            drop(transaction);
            diary.write(&Entry::RolledBack { id });
            continue;
        }
        diary.write(&match transaction.commit().await {
            Ok(()) => Entry::Committed { id },
            Err(error) if error.kind() == FaultKind::OutcomeUnknown => Entry::Unknown { id },
            Err(_) => Entry::RolledBack { id },
        });
    }
    diary.write(&Entry::Written);
}

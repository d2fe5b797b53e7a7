//! A service: it writes events in its transactions and delivers them, and keeps a diary in a file, which survives it.

use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use posthaste::{DatabaseKind, Event, FaultKind, Mode, Outbox, Pool, RetryPolicy, Settings};
use posthaste_core::outbox::Store;
use serde::{Deserialize, Serialize};

/// Where a node finds its role.
pub const ROLE: &str = "POSTHASTE_FAULTS_NODE";

/// What a node is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Role {
    pub url: String,
    pub mode: Mode,
    /// One line for everything that happens.
    pub diary: PathBuf,
    /// How long a delivery takes.
    pub work: Duration,
    pub lease: Duration,
    /// How many events it writes at most; then it only delivers.
    pub writes: u32,
    /// It writes no more once this file is there.
    pub enough: PathBuf,
    /// How many aggregates these are about.
    pub keys: u32,
    /// Distinguishes its events from those of others.
    pub name: String,
}

/// What a diary holds, in the order in which it happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Entry {
    /// The commit was answered.
    Committed { id: String },
    /// The commit failed, and may have happened all the same.
    Unknown { id: String },
    /// It was rolled back, or the commit was refused.
    RolledBack { id: String },
    /// A listener was called.
    Started { id: String, key: u32, number: u32, at: u64 },
    /// A listener is about to succeed.
    Ended { id: String, at: u64 },
    /// Everything is written.
    Written,
}

impl Entry {
    /// The event that it is about.
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

impl Role {
    pub fn of_environment() -> Option<Self> {
        std::env::var(ROLE).ok().map(|role| serde_json::from_str(&role).expect("a role is JSON"))
    }
}

/// A file that lines are appended to, each with one call: a process that is killed leaves whole lines.
#[derive(Clone)]
struct Diary(Arc<File>);

impl Diary {
    fn open(role: &Role) -> Self {
        Self(Arc::new(File::options().append(true).create(true).open(&role.diary).expect("a diary")))
    }

    fn write(&self, entry: &Entry) {
        let line = serde_json::to_string(entry).expect("an entry is JSON") + "\n";
        (&*self.0).write_all(line.as_bytes()).expect("a diary can be written");
    }
}

pub fn now_millis() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

/// Runs until its stdin ends, then closes in order.
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
    // What a killed node leaves behind is tried one by one: few, so that a test need not wait for many.
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
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()).expect("stdin can be read"));
    end.await.expect("stdin ends");
    writing.abort();
    outbox.close().await;
}

/// Every tenth is rolled back.
async fn write<S: Store>(outbox: Outbox<S>, role: Role, diary: Diary) {
    for number in 0..role.writes {
        if role.enough.exists() {
            break;
        }
        let key = number % role.keys.max(1);
        let event = Event::json("order", &Order { key, number }).expect("JSON").aggregate("key", key);
        let event = event.header("writer", &role.name).build().expect("an event");
        let id = event.id().to_owned();
        let Ok(mut transaction) = outbox.begin().await else {
            // The database is away: this order is not taken.
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

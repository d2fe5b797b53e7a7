//! The built-in bus: topics, partitions, offsets and group leases in tables of the same database.

mod append;
mod consumer;
mod inspect;
mod leases;
mod quarantine;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Bus, Consumer, Record, Topics};
use posthaste_core::{FaultKind, StoreError, Wakeup, lock};

use super::Database;

/// The bus on SQLite. Clones share one log: a consumer of one is woken by the appends of another.
#[derive(Clone)]
pub struct Log(Arc<Inner>);

/// How a log is laid out and read.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// How many partitions a new topic has; existing topics keep theirs. The default is one: only one process reads a
    /// SQLite file, so more partitions would only add rows to read.
    pub partitions: u32,
    /// The lease of a partition. When a consumer has not renewed it for this long, another consumer of the group may
    /// lease the partition.
    pub lease: Duration,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { partitions: 1, lease: Duration::from_secs(30) }
    }
}

struct Inner {
    database: Database,
    options: LogOptions,
    /// A cache: topic → the ids of its partitions, in order. Neither ever changes, so it cannot be stale.
    partitions: Mutex<HashMap<Arc<str>, Arc<[i64]>>>,
    subscriptions: Mutex<Vec<Weak<Subscription>>>,
}

/// The topics that a consumer reads, and the wake-up by which this process wakes it.
struct Subscription {
    group: String,
    topics: Topics,
    wakeup: Wakeup,
    /// True if this process created a topic that the consumer reads, or released a partition of its group, since the
    /// consumer last leased partitions.
    partitions_changed: AtomicBool,
}

impl Log {
    /// A log on a database whose hub tables are up to date, see [`Database::migrate_hub`].
    pub fn new(database: Database, options: LogOptions) -> Self {
        let options = LogOptions { partitions: options.partitions.max(1), ..options };
        Self(Arc::new(Inner { database, options, partitions: Mutex::default(), subscriptions: Mutex::default() }))
    }

    /// Ends all leases of all groups. Only for a process that knows that no other process uses the file: the consumers
    /// of a process that was killed would otherwise keep theirs until they expire.
    pub async fn void_leases(&self) -> Result<(), StoreError> {
        leases::void(&self.0.database).await?;
        self.partitions_changed(|_| true);
        Ok(())
    }

    fn wake_readers_of(&self, topics: &BTreeSet<Arc<str>>) {
        for subscription in self.subscriptions() {
            if topics.iter().any(|topic| subscription.reads(topic)) {
                subscription.wakeup.wake();
            }
        }
    }

    fn partitions_changed(&self, concerns: impl Fn(&Subscription) -> bool) {
        for subscription in self.subscriptions().iter().filter(|subscription| concerns(subscription)) {
            subscription.partitions_changed.store(true, Ordering::Release);
            subscription.wakeup.wake();
        }
    }

    fn subscriptions(&self) -> Vec<Arc<Subscription>> {
        let mut subscriptions = lock(&self.0.subscriptions);
        subscriptions.retain(|subscription| subscription.strong_count() > 0);
        subscriptions.iter().filter_map(Weak::upgrade).collect()
    }
}

impl Subscription {
    fn reads(&self, topic: &str) -> bool {
        match &self.topics {
            Topics::Named(names) => names.iter().any(|name| name == topic),
            Topics::Prefix(prefix) => topic.starts_with(prefix.as_str()),
        }
    }
}

#[async_trait]
impl Bus for Log {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), Arc<StoreError>>> {
        let count = records.len();
        if count == 0 {
            return Vec::new();
        }
        // All records are in one transaction, so they share one result.
        vec![self.append(records).await.map_err(Arc::new); count]
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        let subscription = Arc::new(Subscription {
            group: group.to_owned(),
            topics,
            wakeup: Wakeup::default(),
            partitions_changed: AtomicBool::new(true),
        });
        lock(&self.0.subscriptions).push(Arc::downgrade(&subscription));
        Ok(Box::new(consumer::GroupConsumer::join(self.clone(), subscription).await?))
    }
}

/// The error for a value that this crate cannot write or read as JSON.
fn unreadable(doing: &'static str, source: impl Into<posthaste_core::BoxError>) -> StoreError {
    StoreError::new(doing, FaultKind::Permanent, source)
}

/// The stored text: NULL if there are no headers, which is the most common case.
fn headers_to_text(headers: &[(String, String)]) -> Result<Option<String>, serde_json::Error> {
    if headers.is_empty() { Ok(None) } else { serde_json::to_string(headers).map(Some) }
}

fn headers_from_text(text: Option<String>) -> Result<Vec<(String, String)>, serde_json::Error> {
    text.map_or(Ok(Vec::new()), |text| serde_json::from_str(&text))
}

//! The built-in bus: a log of topics in the tables of a database. This module has the rules, and a [`LogStore`] the
//! statements of one database.

mod consumer;
mod notify;
mod store;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;

use crate::bus::{Bus, Consumer, PublishError, Record, Topics};
use crate::{FaultKind, StoreError, Wakeup, lock};
use notify::Notifications;

pub use consumer::MAX_COMPLETED_TEXT;
pub use notify::AppendNotifier;
pub use store::{Leased, Leases, LogStore, Look, Member, NewRecord, Newest, StoredRecord, share};

/// The bus on the tables of one database. Clones share one log: a consumer of one is woken by the appends of another.
pub struct Log<S>(Arc<Inner<S>>);

/// How a log is laid out and read.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// How many partitions a new topic has; existing topics keep theirs.
    pub partitions: u32,
    /// The lease of a partition. When a consumer has not renewed it for this long, another consumer of the group may
    /// lease the partition.
    pub lease: Duration,
    /// How long a consumer that gives up a partition to another one waits for the records in flight.
    pub revoke_timeout: Duration,
}

impl Default for LogOptions {
    /// One partition: only one process reads a SQLite file, so more would only add rows to read.
    fn default() -> Self {
        Self { partitions: 1, lease: Duration::from_secs(30), revoke_timeout: Duration::from_secs(60) }
    }
}

struct Inner<S> {
    store: Arc<S>,
    options: LogOptions,
    /// A cache: topic → the ids of its partitions, in order. Neither ever changes, so it cannot be stale.
    partitions: Mutex<HashMap<Arc<str>, Arc<[i64]>>>,
    subscriptions: Arc<Subscriptions>,
    notifications: Notifications,
}

/// The consumers of this process.
#[derive(Default)]
struct Subscriptions(Mutex<Vec<Weak<Subscription>>>);

/// The topics that a consumer reads, and the wake-up by which this process wakes it.
struct Subscription {
    member: Member,
    wakeup: Wakeup,
    /// True if this process created a topic that the consumer reads, or released a partition of its group, since the
    /// consumer last leased partitions.
    partitions_changed: AtomicBool,
}

impl Subscriptions {
    fn all(&self) -> Vec<Arc<Subscription>> {
        let mut subscriptions = lock(&self.0);
        subscriptions.retain(|subscription| subscription.strong_count() > 0);
        subscriptions.iter().filter_map(Weak::upgrade).collect()
    }

    fn wake_readers_of<'a>(&self, topics: impl IntoIterator<Item = &'a str> + Clone) {
        for subscription in self.all() {
            if topics.clone().into_iter().any(|topic| subscription.member.reads(topic)) {
                subscription.wakeup.wake();
            }
        }
    }

    fn wake_all(&self) {
        self.all().iter().for_each(|subscription| subscription.wakeup.wake());
    }
}

impl<S> Clone for Log<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: LogStore> Log<S> {
    /// A log on tables that are up to date.
    pub fn new(store: S, options: LogOptions) -> Self {
        let options = LogOptions { partitions: options.partitions.max(1), ..options };
        Self(Arc::new(Inner {
            store: Arc::new(store),
            options,
            partitions: Mutex::default(),
            subscriptions: Arc::default(),
            notifications: Notifications::default(),
        }))
    }

    /// The store that this log is on.
    pub fn store(&self) -> &S {
        &self.0.store
    }

    /// Wakes the consumers of this process that read these topics: another process has appended to them.
    pub fn wake_readers_of<'a>(&self, topics: impl IntoIterator<Item = &'a str> + Clone) {
        self.0.subscriptions.wake_readers_of(topics);
    }

    /// Makes all consumers of this process look for partitions at once: leases were ended from outside.
    pub fn leases_ended(&self) {
        self.partitions_changed(|_| true);
    }

    fn partitions_changed(&self, concerns: impl Fn(&Subscription) -> bool) {
        for subscription in self.0.subscriptions.all().iter().filter(|subscription| concerns(subscription)) {
            subscription.partitions_changed.store(true, Ordering::Release);
            subscription.wakeup.wake();
        }
    }

    fn check(&self, record: &Record) -> Result<(), PublishError> {
        record.check_size()?;
        self.0.store.check(record)
    }

    /// Appends all records in one transaction, or none.
    async fn append(&self, records: Vec<Record>) -> Result<(), StoreError> {
        let topics: BTreeSet<Arc<str>> = records.iter().map(|record| Arc::clone(&record.topic)).collect();
        let partitions = self.partitions_of(&topics).await?;
        let mut rows = Vec::with_capacity(records.len());
        for Record { topic, route, key, value, headers } in records {
            // Missing only if the database changed the name.
            let ids = partitions.get(&topic).filter(|ids| !ids.is_empty()).ok_or_else(|| {
                let problem = format!("topic {topic} has no partitions");
                StoreError::new("append to the log", FaultKind::Permanent, problem)
            })?;
            let partition_id = ids[(route % ids.len() as u64) as usize];
            rows.push(NewRecord { partition_id, key, value, headers });
        }
        // A stable sort: records of one partition keep their order.
        rows.sort_by_key(|row| row.partition_id);
        self.0.store.append(rows).await?;
        self.wake_readers_of(topics.iter().map(|topic| &**topic));
        self.0.notifications.appended(&self.0.store, topics);
        Ok(())
    }

    async fn partitions_of(&self, topics: &BTreeSet<Arc<str>>) -> Result<HashMap<Arc<str>, Arc<[i64]>>, StoreError> {
        let mut found = HashMap::new();
        let mut missing = Vec::new();
        {
            let known = lock(&self.0.partitions);
            for topic in topics {
                match known.get(topic) {
                    Some(ids) => _ = found.insert(Arc::clone(topic), Arc::clone(ids)),
                    None => missing.push(topic.to_string()),
                }
            }
        }
        if !missing.is_empty() {
            found.extend(self.create_topics(missing).await?);
        }
        Ok(found)
    }

    async fn create_topics(&self, names: Vec<String>) -> Result<HashMap<Arc<str>, Arc<[i64]>>, StoreError> {
        let created = self.0.store.create_topics(names.clone(), self.0.options.partitions).await?;
        let created: HashMap<Arc<str>, Arc<[i64]>> =
            created.into_iter().map(|(topic, ids)| (topic.into(), ids.into())).collect();
        lock(&self.0.partitions).extend(created.clone());
        self.partitions_changed(|subscription| names.iter().any(|topic| subscription.member.reads(topic)));
        Ok(created)
    }
}

#[async_trait]
impl<S: LogStore> Bus for Log<S> {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        let mut results: Vec<_> = records.iter().map(|record| self.check(record)).collect();
        let accepted = records.into_iter().zip(&results).filter(|(_, result)| result.is_ok());
        let accepted: Vec<Record> = accepted.map(|(record, _)| record).collect();
        // All accepted records are in one transaction, so they share one result.
        if !accepted.is_empty()
            && let Err(error) = self.append(accepted).await
        {
            let error = PublishError::Unavailable(Arc::new(error));
            results.iter_mut().filter(|result| result.is_ok()).for_each(|result| *result = Err(error.clone()));
        }
        results
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        // Unique, and the same in every run of a seeded simulation.
        let owner = format!("{:032x}", fastrand::u128(..));
        let subscription = Arc::new(Subscription {
            member: Member { group: group.to_owned(), owner, topics },
            wakeup: Wakeup::default(),
            partitions_changed: AtomicBool::new(true),
        });
        lock(&self.0.subscriptions.0).push(Arc::downgrade(&subscription));
        self.0.notifications.listen(&self.0.store, &self.0.subscriptions);
        Ok(Box::new(consumer::GroupConsumer::join(self.clone(), subscription).await?))
    }
}

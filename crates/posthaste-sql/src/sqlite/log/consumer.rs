use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::TryStreamExt;
use posthaste_core::bus::{Consumer, Fetched, Position};
use posthaste_core::{Settled, StoreError, Wakeup};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::super::errors::store_error;
use super::super::unreadable::{report, text};
use super::holdings::{Held, Holdings};
use super::leases::{Advance, Leases};
use super::{Log, Subscription, headers_from_text, lock, unreadable};

/// How often a consumer looks into the table for topics and free partitions that other processes made.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// What one fetch may bring into memory, but for one record that is larger alone.
const MAX_FETCH_BYTES: usize = 16 << 20;

/// A range scan per partition, one after the other as the list has them. CROSS JOIN fixes that order; offsets ascend
/// because that is how the index has them, which is named so that statistics cannot choose another way. So nothing is
/// sorted and the limit ends the reading.
const FETCH: &str = "
    SELECT record.partition_id, record.\"offset\", record.key, record.value, record.headers
    FROM json_each(?1) AS wanted
    CROSS JOIN log_record AS record INDEXED BY log_record_place
       ON record.partition_id = wanted.value ->> 0 AND record.\"offset\" >= wanted.value ->> 1
    LIMIT ?2";

/// The last record and the last partition that were made: two steps into the ends of their tables.
const NEWEST: &str = "SELECT (SELECT max(rowid) FROM log_record), (SELECT max(id) FROM log_partition)";

/// A record that was read but not yet handed out.
struct Candidate {
    partition_id: i64,
    offset: i64,
    key: String,
    value: Bytes,
    headers: Vec<(String, String)>,
    damage: Option<String>,
}

impl Candidate {
    /// What can be read of a row. Only a row without a place in its partition is an error.
    fn of(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let mut candidate = Self {
            partition_id: row.try_get(0)?,
            offset: row.try_get(1)?,
            key: text(row, 2),
            value: row.try_get_unchecked::<Option<Vec<u8>>, _>(3)?.unwrap_or_default().into(),
            headers: Vec::new(),
            damage: None,
        };
        let headers = row.try_get::<Option<String>, _>(4).map_err(|error| error.to_string());
        let headers = headers.and_then(|headers| headers_from_text(headers).map_err(|error| error.to_string()));
        match headers {
            Ok(headers) => candidate.headers = headers,
            Err(error) => {
                candidate.damage = Some(format!("headers are no JSON array of [name, value] pairs: {error}"));
                // As they stand, for the quarantine.
                candidate.headers.push(("unreadable".to_owned(), text(row, 4)));
            }
        }
        if let Err(error) = row.try_get::<String, _>(2) {
            candidate.damage = Some(format!("its key is not text: {error}"));
        }
        Ok(candidate)
    }
}

/// One member of a group.
pub(super) struct GroupConsumer {
    log: Log,
    subscription: Arc<Subscription>,
    leases: Leases,
    holdings: Mutex<Holdings>,
    /// Held while partitions change hands and while records are handed out, so that neither happens during the other.
    membership: tokio::sync::Mutex<Membership>,
    /// Held while progress is recorded: the next ack builds on what this one wrote.
    recording: tokio::sync::Mutex<()>,
}

struct Membership {
    /// When the statement that last started all leases anew was sent.
    renewed_at: Option<Instant>,
    looked_at: Instant,
    nothing_new: Option<NothingNew>,
    closed: bool,
    /// Progress rows that were reported as unreadable.
    reported: HashSet<String>,
}

/// What a look at every partition began with that found nothing. Until one of these changes, the next would find nothing,
/// either. An idle group with a thousand topics would otherwise read a thousand places twice a second.
struct NothingNew {
    newest: Newest,
    wanted: Vec<(i64, i64)>,
    at: Instant,
}

type Newest = (Option<i64>, Option<i64>);

impl Membership {
    /// Whether so much of the leases has passed that less is left than [`Consumer::lease`] promises.
    fn is_aged(&self, full_lease: Duration) -> bool {
        self.renewed_at.is_none_or(|at| at.elapsed() >= full_lease / 10)
    }
}

impl GroupConsumer {
    pub(super) async fn join(log: Log, subscription: Arc<Subscription>) -> Result<Self, StoreError> {
        let owner = uuid::Uuid::now_v7().to_string();
        let consumer = Self {
            leases: Leases::new(log.0.database.clone(), &subscription, owner)?,
            log,
            subscription,
            holdings: Mutex::default(),
            membership: tokio::sync::Mutex::new(Membership {
                renewed_at: None,
                looked_at: Instant::now(),
                nothing_new: None,
                closed: false,
                reported: HashSet::new(),
            }),
            recording: tokio::sync::Mutex::default(),
        };
        consumer.keep_leases(&mut *consumer.membership.lock().await).await?;
        Ok(consumer)
    }

    fn full_lease(&self) -> Duration {
        self.log.0.options.lease
    }

    /// Makes sure that every lease has most of its time before it, and that what is free is ours.
    async fn keep_leases(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let changed = self.subscription.partitions_changed.swap(false, Ordering::AcqRel);
        let mut take = changed || membership.is_aged(self.full_lease());
        if !take && membership.looked_at.elapsed() >= LOOK_INTERVAL {
            take = self.leases.any_free(self.full_lease()).await?;
            membership.looked_at = Instant::now();
        }
        if !take {
            return Ok(());
        }
        let result = self.take_partitions(membership).await;
        if result.is_err() && changed {
            self.subscription.partitions_changed.store(true, Ordering::Release);
        }
        result
    }

    async fn take_partitions(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let sent_at = Instant::now();
        let (granted, unreadable) = self.leases.take(self.full_lease()).await?;
        for (key, reason) in unreadable {
            // The lease is renewed every few seconds: once is enough for the log.
            if membership.reported.insert(key.clone()) {
                report("log_group", &key, &reason);
            }
        }
        let ours: HashSet<i64> = granted.iter().map(|granted| granted.partition_id).collect();
        let mut holdings = lock(&self.holdings);
        holdings.retain(|id| ours.contains(&id));
        for granted in granted {
            if holdings.generation(granted.partition_id) != Some(granted.generation) {
                let progress = granted.progress(&self.subscription.group);
                let held = Held::new(granted.topic, granted.partition, granted.generation, progress);
                holdings.insert(granted.partition_id, held);
            }
        }
        membership.renewed_at = Some(sent_at);
        membership.looked_at = sent_at;
        Ok(())
    }

    async fn newest(&self) -> Result<Newest, StoreError> {
        let newest = sqlx::query_as(NEWEST).fetch_one(self.log.0.database.readers()).await;
        newest.map_err(|error| store_error("look at the end of the log", error))
    }

    /// Whether a fetch need not look: nothing was appended or made since a look that found nothing, nothing else is wanted,
    /// and leases are young enough to be renewed later. From time to time it looks all the same, for partitions that another
    /// process left behind.
    fn is_idle(&self, membership: &Membership, newest: Newest) -> bool {
        let full_lease = self.full_lease();
        let is_young = membership.renewed_at.is_some_and(|at| at.elapsed() < full_lease / 2);
        let nothing_new = membership.nothing_new.as_ref().is_some_and(|nothing| {
            nothing.newest == newest
                && nothing.at.elapsed() < full_lease / 10
                && nothing.wanted == lock(&self.holdings).wanted()
        });
        is_young && nothing_new && !self.subscription.partitions_changed.load(Ordering::Acquire)
    }

    /// Reads rows in the order of the turns; true when there may be more.
    async fn read(&self, wanted: &[(i64, i64)], limit: usize) -> Result<(Vec<Candidate>, bool), StoreError> {
        const DOING: &str = "read the log";
        let wanted = serde_json::to_string(wanted).map_err(|error| unreadable(DOING, error))?;
        let limit_bound = i64::try_from(limit).unwrap_or(i64::MAX);
        let query = sqlx::query(FETCH).bind(wanted).bind(limit_bound);
        let mut stream = query.fetch(self.log.0.database.readers());
        let mut read = Vec::new();
        let (mut rows, mut bytes) = (0, 0);
        while let Some(row) = stream.try_next().await.map_err(|error| store_error(DOING, error))? {
            rows += 1;
            match Candidate::of(&row) {
                Ok(candidate) => {
                    bytes += candidate.value.len();
                    read.push(candidate);
                }
                Err(error) => report("log_record", &format!("{} {}", text(&row, 0), text(&row, 1)), &error),
            }
            if bytes >= MAX_FETCH_BYTES {
                return Ok((read, true));
            }
        }
        let full = rows == limit;
        Ok((read, full))
    }

    fn hand_out(&self, candidates: Vec<Candidate>) -> Vec<Fetched> {
        let mut holdings = lock(&self.holdings);
        let hand_out = |candidate: Candidate| {
            let position = holdings.hand_out(candidate.partition_id, candidate.offset)?;
            let Candidate { key, value, headers, damage, .. } = candidate;
            Some(Fetched { position, key, value, headers, damage })
        };
        candidates.into_iter().filter_map(hand_out).collect()
    }

    /// The partition of each position, where it is still ours, and what these partitions record when all is done.
    fn advance(&self, positions: &[&Position]) -> (Vec<Option<i64>>, Vec<Advance>) {
        let holdings = lock(&self.holdings);
        let mut advances: BTreeMap<i64, Advance> = BTreeMap::new();
        let complete = |position: &&Position| {
            let (partition_id, held) = holdings.find(position)?;
            let advance = advances.entry(partition_id).or_insert_with(|| Advance {
                partition_id,
                generation: held.generation,
                progress: held.progress.clone(),
            });
            advance.progress.complete(position.offset);
            Some(partition_id)
        };
        let partitions = positions.iter().map(complete).collect();
        (partitions, advances.into_values().collect())
    }
}

#[async_trait]
impl Consumer for GroupConsumer {
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError> {
        let mut membership = self.membership.lock().await;
        if membership.closed || limit == 0 {
            return Ok(Vec::new());
        }
        // Asked before the look: what is appended during it is seen by the next.
        let newest = self.newest().await?;
        if self.is_idle(&membership, newest) {
            return Ok(Vec::new());
        }
        self.keep_leases(&mut membership).await?;
        loop {
            let wanted = lock(&self.holdings).wanted();
            if wanted.is_empty() {
                return Ok(Vec::new());
            }
            let (candidates, full) = self.read(&wanted, limit).await?;
            if candidates.is_empty() {
                membership.nothing_new = Some(NothingNew { newest, wanted, at: Instant::now() });
                return Ok(Vec::new());
            }
            if let Some(last) = candidates.last().filter(|_| full) {
                lock(&self.holdings).took_its_turn(last.partition_id);
            }
            let fetched = self.hand_out(candidates);
            if full && (1..limit).contains(&fetched.len()) {
                // The caller sees fewer than it asked for and would wait; this keeps it from doing so.
                self.subscription.wakeup.wake();
            }
            membership.nothing_new = None;
            // A full read of which nothing was left was all done before: there may be more behind it.
            if !fetched.is_empty() || !full {
                return Ok(fetched);
            }
        }
    }

    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let _recording = self.recording.lock().await;
        let (partitions, advances) = self.advance(positions);
        if advances.is_empty() {
            return Ok(vec![Settled::LostLease; positions.len()]);
        }
        let recorded: HashSet<i64> = self.leases.record(&advances).await?.into_iter().collect();
        let mut holdings = lock(&self.holdings);
        for advance in advances {
            if !recorded.contains(&advance.partition_id) {
                holdings.forget(advance.partition_id, advance.generation);
            } else if holdings.recorded(advance) {
                self.subscription.wakeup.wake();
            }
        }
        let is_recorded = |id: Option<i64>| id.is_some_and(|id| recorded.contains(&id));
        Ok(partitions.into_iter().map(|id| settled(is_recorded(id))).collect())
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut membership = self.membership.lock().await;
        // It is called with every claim that has due retries: young leases are not worth a row per partition each time.
        if !membership.closed && membership.is_aged(self.full_lease()) {
            self.take_partitions(&mut membership).await?;
        }
        let holdings = lock(&self.holdings);
        Ok(positions.iter().map(|position| settled(holdings.find(position).is_some())).collect())
    }

    async fn close(&self) -> Result<(), StoreError> {
        let mut membership = self.membership.lock().await;
        membership.closed = true;
        lock(&self.holdings).retain(|_| false);
        self.leases.give_up().await?;
        let group = &self.subscription.group;
        self.log.partitions_changed(|other| other.group == *group && !std::ptr::eq(other, &*self.subscription));
        Ok(())
    }

    fn lease(&self) -> Duration {
        // Leases are started anew when a tenth of their time has passed: this much is left of each at any fetch or renewal.
        self.full_lease() * 9 / 10
    }

    fn wakeup(&self) -> &Wakeup {
        &self.subscription.wakeup
    }
}

fn settled(applied: bool) -> Settled {
    if applied { Settled::Applied } else { Settled::LostLease }
}

#[cfg(test)]
mod tests {
    use super::super::leases::RECORD;
    use super::*;
    use crate::sqlite::Database;

    async fn plan_of(statement: &'static str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("log.db").display());
        let database = Database::open(&url).await.unwrap();
        database.migrate_hub().await.unwrap();
        let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"));
        let rows: Vec<(i64, i64, i64, String)> =
            sqlx::query_as(explain).bind("[]").fetch_all(database.readers()).await.unwrap();
        rows.into_iter().map(|(.., detail)| detail).collect()
    }

    #[tokio::test]
    async fn a_fetch_is_a_range_scan_per_partition_and_sorts_nothing() {
        let plan = plan_of(FETCH).await;
        assert_eq!(plan.len(), 2, "{plan:?}");
        assert!(plan[0].starts_with("SCAN wanted VIRTUAL TABLE"), "{plan:?}");
        assert_eq!(plan[1], "SEARCH record USING INDEX log_record_place (partition_id=? AND offset>?)");
    }

    #[tokio::test]
    async fn an_ack_looks_up_each_partition_once() {
        let plan = plan_of(RECORD).await;
        assert_eq!(plan[..1], ["MATERIALIZE done"], "{plan:?}");
        assert_eq!(
            plan[2..],
            ["SCAN done", "SEARCH log_group USING PRIMARY KEY (group_name=? AND partition_id=?)"],
            "{plan:?}"
        );
    }
}

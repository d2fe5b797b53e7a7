use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::TryStreamExt;
use posthaste_core::bus::{Advance, AssignedPartition, Assignment, Consumer, Fetched, Position};
use posthaste_core::{Settled, StoreError, Wakeup, lock};
use sqlx::Row;
use sqlx::sqlite::SqliteRow;
use tokio::time::Instant;

use super::leases::Leases;
use super::{Log, Subscription, headers_from_text, unreadable};
use crate::sqlite::errors::{doing, store_error};
use crate::sqlite::unreadable::{report, text};

/// How often a consumer searches for new topics and free partitions of other processes.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The maximum size of one fetch. A single record may be larger.
const MAX_FETCH_BYTES: usize = 16 << 20;

/// One range scan per partition, in the order of the list. CROSS JOIN fixes the order of the partitions, and the index
/// that of the offsets. The statement names the index, so that the planner cannot choose another one. So nothing is
/// sorted, and the limit ends the scan.
const FETCH: &str = "
    SELECT record.partition_id, record.\"offset\", record.key, record.value, record.headers
    FROM json_each(?1) AS place
    CROSS JOIN log_record AS record INDEXED BY log_record_place
       ON record.partition_id = place.value ->> 0 AND record.\"offset\" >= place.value ->> 1
    LIMIT ?2";

/// The newest record and the newest partition: one index lookup each.
const NEWEST: &str = "SELECT (SELECT max(rowid) FROM log_record), (SELECT max(id) FROM log_partition)";

/// A record that was read but not yet handed out.
struct ReadRecord {
    partition_id: i64,
    offset: i64,
    key: String,
    value: Bytes,
    headers: Vec<(String, String)>,
    damage: Option<String>,
}

impl ReadRecord {
    /// Reads a row. Unreadable columns become the `damage`; only a row without partition and offset is an error.
    fn of(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let mut record = Self {
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
            Ok(headers) => record.headers = headers,
            Err(error) => {
                record.damage = Some(format!("headers are no JSON array of [name, value] pairs: {error}"));
                // The stored text, for the quarantine.
                record.headers.push(("unreadable".to_owned(), text(row, 4)));
            }
        }
        if let Err(error) = row.try_get::<String, _>(2) {
            record.damage = Some(format!("its key is not text: {error}"));
        }
        Ok(record)
    }
}

/// One member of a group.
pub(super) struct GroupConsumer {
    log: Log,
    subscription: Arc<Subscription>,
    leases: Leases,
    assignment: Mutex<Assignment>,
    /// Locked while partitions are assigned and while records are handed out, so that neither happens during the other.
    membership: tokio::sync::Mutex<Membership>,
    /// Locked while progress is recorded, because each ack adds to the progress that the previous ack wrote.
    recording: tokio::sync::Mutex<()>,
}

struct Membership {
    /// When the statement that last renewed all leases was sent.
    renewed_at: Option<Instant>,
    looked_at: Instant,
    nothing_new: Option<NothingNew>,
    closed: bool,
    /// The progress rows that were already reported as unreadable.
    reported: HashSet<String>,
}

/// The state at a fetch that found nothing in any partition. Until one of these values changes, the next fetch would
/// find nothing, either. Without this check, an idle group with a thousand topics would run a thousand range scans
/// twice a second.
struct NothingNew {
    newest: Newest,
    places: Vec<(i64, i64)>,
}

type Newest = (Option<i64>, Option<i64>);

impl Membership {
    /// True if the remaining time of the leases is shorter than [`Consumer::lease`].
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
            assignment: Mutex::default(),
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

    /// Renews leases that have aged, and leases free partitions.
    async fn keep_leases(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let changed = self.subscription.partitions_changed.swap(false, Ordering::AcqRel);
        let mut must_lease = changed || membership.is_aged(self.full_lease());
        if !must_lease && membership.looked_at.elapsed() >= LOOK_INTERVAL {
            must_lease = self.find_free(membership).await?;
        }
        if !must_lease {
            return Ok(());
        }
        let result = self.lease_partitions(membership).await;
        if result.is_err() && changed {
            self.subscription.partitions_changed.store(true, Ordering::Release);
        }
        result
    }

    /// True if there is a partition that this consumer could lease: a new one, or one of a process that crashed.
    async fn find_free(&self, membership: &mut Membership) -> Result<bool, StoreError> {
        let found = self.leases.any_free(self.full_lease()).await?;
        membership.looked_at = Instant::now();
        Ok(found)
    }

    async fn lease_partitions(&self, membership: &mut Membership) -> Result<(), StoreError> {
        let sent_at = Instant::now();
        let (leased, unreadable) = self.leases.acquire(self.full_lease()).await?;
        for (key, reason) in unreadable {
            // The lease is renewed every few seconds, but each row is logged only once.
            if membership.reported.insert(key.clone()) {
                report("log_group", &key, &reason);
            }
        }
        let ids: HashSet<i64> = leased.iter().map(|leased| leased.partition_id).collect();
        let mut assignment = lock(&self.assignment);
        assignment.retain(|id| ids.contains(&id));
        for leased in leased {
            if !assignment.contains(leased.partition_id, leased.generation) {
                let progress = leased.progress(&self.subscription.group);
                let partition = AssignedPartition::new(leased.topic, leased.partition, leased.generation, progress);
                assignment.insert(leased.partition_id, partition, sent_at + self.full_lease());
            }
        }
        membership.renewed_at = Some(sent_at);
        membership.looked_at = sent_at;
        Ok(())
    }

    async fn newest(&self) -> Result<Newest, StoreError> {
        let newest = sqlx::query_as(NEWEST).fetch_one(self.log.0.database.readers());
        doing("look at the end of the log", newest).await
    }

    /// True if a fetch would find nothing: no record was appended since a fetch that found nothing, the consumer would
    /// read from the same offsets, and the leases need no renewal.
    fn is_idle(&self, membership: &Membership, newest: Newest) -> bool {
        let is_young = membership.renewed_at.is_some_and(|at| at.elapsed() < self.full_lease() / 2);
        let nothing_new = membership
            .nothing_new
            .as_ref()
            .is_some_and(|nothing| nothing.newest == newest && nothing.places == lock(&self.assignment).fetchable());
        is_young && nothing_new && !self.subscription.partitions_changed.load(Ordering::Acquire)
    }

    /// Reads rows in the order of fetching; true if there may be more.
    async fn read(&self, places: &[(i64, i64)], limit: usize) -> Result<(Vec<ReadRecord>, bool), StoreError> {
        const DOING: &str = "read the log";
        let places = serde_json::to_string(places).map_err(|error| unreadable(DOING, error))?;
        let limit_bound = i64::try_from(limit).unwrap_or(i64::MAX);
        let query = sqlx::query(FETCH).bind(places).bind(limit_bound);
        let mut stream = query.fetch(self.log.0.database.readers());
        let mut read = Vec::new();
        let (mut rows, mut bytes) = (0, 0);
        while let Some(row) = stream.try_next().await.map_err(|error| store_error(DOING, error))? {
            rows += 1;
            match ReadRecord::of(&row) {
                Ok(record) => {
                    bytes += record.value.len();
                    read.push(record);
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

    fn hand_out(&self, records: Vec<ReadRecord>) -> Vec<Fetched> {
        let mut assignment = lock(&self.assignment);
        let hand_out = |record: ReadRecord| {
            let position = assignment.hand_out(record.partition_id, record.offset)?;
            let ReadRecord { key, value, headers, damage, .. } = record;
            Some(Fetched { position, key, value, headers, damage })
        };
        records.into_iter().filter_map(hand_out).collect()
    }

    /// The partition of each position, if the consumer still has it, and the progress of these partitions with the acks
    /// added.
    fn advance(&self, positions: &[&Position]) -> (Vec<Option<i64>>, Vec<Advance>) {
        let assignment = lock(&self.assignment);
        let mut advances: BTreeMap<i64, Advance> = BTreeMap::new();
        let complete = |position: &&Position| {
            let partition_id = assignment.id_of(position)?;
            let advance = match advances.entry(partition_id) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(assignment.advance(partition_id, position.generation)?),
            };
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
        // Read before the fetch, so that the next fetch notices records that are appended during this one.
        let newest = self.newest().await?;
        if self.is_idle(&membership, newest) {
            // The leases are not renewed each time, because that writes one row per partition.
            let may_wait = membership.looked_at.elapsed() < self.full_lease() / 10;
            if may_wait || !self.find_free(&mut membership).await? {
                return Ok(Vec::new());
            }
            self.subscription.partitions_changed.store(true, Ordering::Release);
        }
        self.keep_leases(&mut membership).await?;
        loop {
            let places = lock(&self.assignment).fetchable();
            if places.is_empty() {
                return Ok(Vec::new());
            }
            let (records, full) = self.read(&places, limit).await?;
            if records.is_empty() {
                membership.nothing_new = Some(NothingNew { newest, places });
                return Ok(Vec::new());
            }
            if let Some(last) = records.last().filter(|_| full) {
                lock(&self.assignment).move_to_back(last.partition_id);
            }
            let fetched = self.hand_out(records);
            if full && (1..limit).contains(&fetched.len()) {
                // The caller gets fewer records than `limit` and would wait for a wake-up, although there are more.
                self.subscription.wakeup.wake();
            }
            membership.nothing_new = None;
            // If a full read contained only completed records, there may be more records after it.
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
        let mut assignment = lock(&self.assignment);
        for advance in advances {
            if !recorded.contains(&advance.partition_id) {
                assignment.remove(advance.partition_id, advance.generation);
            } else if assignment.recorded(advance) {
                self.subscription.wakeup.wake();
            }
        }
        let is_recorded = |id: Option<i64>| id.is_some_and(|id| recorded.contains(&id));
        Ok(partitions.into_iter().map(|id| Settled::of(is_recorded(id))).collect())
    }

    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError> {
        let mut membership = self.membership.lock().await;
        // The source calls `renew` at every claim with due retries. Young leases are not renewed each time, because
        // that writes one row per partition.
        if !membership.closed && membership.is_aged(self.full_lease()) {
            self.lease_partitions(&mut membership).await?;
        }
        let assignment = lock(&self.assignment);
        Ok(positions.iter().map(|position| Settled::of(assignment.id_of(position).is_some())).collect())
    }

    async fn close(&self) -> Result<(), StoreError> {
        let mut membership = self.membership.lock().await;
        membership.closed = true;
        lock(&self.assignment).retain(|_| false);
        self.leases.release().await?;
        let group = &self.subscription.group;
        self.log.partitions_changed(|other| other.group == *group && !std::ptr::eq(other, &*self.subscription));
        Ok(())
    }

    fn lease(&self) -> Duration {
        // Leases are renewed when a tenth of their time has passed, so this much is left after a fetch or renewal.
        self.full_lease() * 9 / 10
    }

    fn wakeup(&self) -> &Wakeup {
        &self.subscription.wakeup
    }
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
        assert!(plan[0].starts_with("SCAN place VIRTUAL TABLE"), "{plan:?}");
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

//! The statements on `log_group`: the consumer that reads a partition, and its progress.

use std::fmt::Display;
use std::time::Duration;

use posthaste_core::bus::{Advance, Topics};
use posthaste_core::{Progress, StoreError};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row};

use super::{Subscription, unreadable};
use crate::sqlite::Database;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::errors::doing;
use crate::sqlite::unreadable::{report, text};

/// The condition that a lease has ended. `?4` is the length of a lease. A lease that ends later than that from now was
/// begun before the clock was set back. Its real end is unknown, so it counts as ended.
fn ended() -> String {
    format!("(leased_until < {NOW_MS} OR leased_until > {NOW_MS} + ?4 * 11 / 10)")
}

/// Fenced: records progress only if owner and generation are still those under which the records were read.
///
/// The list is materialized. Otherwise SQLite would parse it again for every partition of the group.
pub(super) const RECORD: &str = "
    WITH done (id, generation, watermark, completed) AS MATERIALIZED
        (SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3 FROM json_each(?1))
    UPDATE log_group SET watermark = done.watermark, completed = done.completed FROM done
    WHERE log_group.group_name = ?2 AND log_group.partition_id = done.id
      AND log_group.owner = ?3 AND log_group.generation = done.generation
    RETURNING partition_id";

/// The positions of these columns in [`Leases::acquire`].
const COMPLETED: usize = 3;
const TOPIC: usize = 4;
const PARTITION: usize = 5;

/// A partition that the consumer has leased.
pub(super) struct Leased {
    pub(super) partition_id: i64,
    pub(super) topic: String,
    pub(super) partition: u32,
    pub(super) generation: i64,
    watermark: i64,
    completed: String,
}

impl Leased {
    fn of(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            partition_id: row.try_get("partition_id")?,
            topic: row.try_get("topic")?,
            partition: row.try_get("partition")?,
            generation: row.try_get("generation")?,
            watermark: row.try_get("watermark")?,
            completed: text(row, COMPLETED),
        })
    }

    /// The progress of the group. If the completed set cannot be read, all records from the watermark on are delivered
    /// again. That may repeat deliveries, but loses none.
    pub(super) fn progress(&self, group: &str) -> Progress {
        Progress::decode(self.watermark, &self.completed).unwrap_or_else(|error| {
            let key = key_of(group, &self.topic, self.partition);
            report("log_group", &key, &format_args!("{error}; deliveries after offset {} repeat", self.watermark));
            Progress::at(self.watermark)
        })
    }
}

/// The key by which an operator finds a progress row.
fn key_of(group: &str, topic: &str, partition: impl Display) -> String {
    format!("{group} {topic} {partition}")
}

/// The key of a progress row that cannot be read, and why.
type Unreadable = (String, String);

/// The leases of one consumer.
#[derive(Clone)]
pub(super) struct Leases {
    database: Database,
    group: String,
    owner: String,
    /// The condition on `log_partition` that selects the topics, and the value of its parameter `?1`.
    matching: &'static str,
    topics: String,
}

impl Leases {
    pub(super) fn new(database: Database, subscription: &Subscription, owner: String) -> Result<Self, StoreError> {
        let (matching, topics) = match &subscription.topics {
            Topics::Named(names) => (
                "topic IN (SELECT value FROM json_each(?1))",
                serde_json::to_string(names).map_err(|error| unreadable("name the topics of a group", error))?,
            ),
            Topics::Prefix(prefix) => ("substr(topic, 1, length(?1)) = ?1", prefix.clone()),
        };
        Ok(Self { database, group: subscription.group.clone(), owner, matching, topics })
    }

    /// True if there is a free partition. It writes nothing, so it may be called often.
    pub(super) async fn any_free(&self, lease: Duration) -> Result<bool, StoreError> {
        let sql = format!(
            "SELECT EXISTS (
                SELECT 1 FROM log_partition LEFT JOIN log_group ON group_name = ?2 AND partition_id = id
                WHERE {} AND (owner IS NULL OR (owner <> ?3 AND {})))",
            self.matching,
            ended()
        );
        let query = sqlx::query_scalar(AssertSqlSafe(sql)).bind(&self.topics).bind(&self.group).bind(&self.owner);
        let query = query.bind(millis(lease));
        doing("look for free partitions", query.fetch_one(self.database.readers())).await
    }

    /// Leases the partitions that are free, renews the leases of this consumer, and returns all partitions that it has
    /// now, except those whose progress row cannot be read.
    pub(super) async fn acquire(&self, lease: Duration) -> Result<(Vec<Leased>, Vec<Unreadable>), StoreError> {
        // A group starts at the earliest existing record: records that retention removed could never be acked.
        let join = format!(
            "INSERT INTO log_group (group_name, partition_id, watermark)
             SELECT ?2, id, coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = id), next_offset)
             FROM log_partition WHERE {} ON CONFLICT DO NOTHING",
            self.matching
        );
        let acquire = format!(
            "UPDATE log_group
             SET generation = generation + (owner IS NOT ?3), owner = ?3, leased_until = {NOW_MS} + ?4
             WHERE group_name = ?2 AND partition_id IN (SELECT id FROM log_partition WHERE {})
               AND (owner IS NULL OR owner = ?3 OR {})
             RETURNING partition_id, generation, watermark, completed,
                (SELECT topic FROM log_partition WHERE id = partition_id) AS topic,
                (SELECT partition FROM log_partition WHERE id = partition_id) AS partition",
            self.matching,
            ended()
        );
        let lease = millis(lease);
        let leases = self.clone();
        let rows = self
            .database
            .write("lease partitions", move |connection| {
                let (leases, join, acquire) = (leases.clone(), join.clone(), acquire.clone());
                Box::pin(async move {
                    let join = sqlx::query(AssertSqlSafe(join)).bind(&leases.topics).bind(&leases.group);
                    join.execute(&mut *connection).await?;
                    let acquire = sqlx::query(AssertSqlSafe(acquire)).bind(leases.topics).bind(leases.group);
                    acquire.bind(leases.owner).bind(lease).fetch_all(connection).await
                })
            })
            .await?;
        let (mut leased, mut unreadable) = (Vec::with_capacity(rows.len()), Vec::new());
        for row in &rows {
            match Leased::of(row) {
                Ok(partition) => leased.push(partition),
                Err(error) => {
                    let key = key_of(&self.group, &text(row, TOPIC), text(row, PARTITION));
                    unreadable.push((key, error.to_string()));
                }
            }
        }
        Ok((leased, unreadable))
    }

    /// Records progress in the partitions that this consumer still has, and returns those.
    pub(super) async fn record(&self, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
        const DOING: &str = "record acks";
        let row = |Advance { partition_id, generation, progress }: &Advance| {
            (*partition_id, *generation, progress.watermark(), progress.encode())
        };
        let rows: Vec<_> = advances.iter().map(row).collect();
        let rows = serde_json::to_string(&rows).map_err(|error| unreadable(DOING, error))?;
        let leases = self.clone();
        self.database
            .write(DOING, move |connection| {
                let record = sqlx::query_scalar(RECORD).bind(rows.clone());
                let record = record.bind(leases.group.clone()).bind(leases.owner.clone());
                Box::pin(record.fetch_all(connection))
            })
            .await
    }

    /// Ends all leases of this consumer, so that others of its group can lease the partitions at once.
    pub(super) async fn release(&self) -> Result<(), StoreError> {
        const RELEASE: &str =
            "UPDATE log_group SET owner = NULL, leased_until = 0 WHERE group_name = ?1 AND owner = ?2";
        let leases = self.clone();
        self.database
            .write("release partitions", move |connection| {
                let release = sqlx::query(RELEASE).bind(leases.group.clone()).bind(leases.owner.clone());
                Box::pin(release.execute(connection))
            })
            .await
            .map(|_| ())
    }
}

/// Ends the leases of all consumers of all groups.
pub(super) async fn void(database: &Database) -> Result<(), StoreError> {
    const VOID: &str = "UPDATE log_group SET owner = NULL, leased_until = 0 WHERE owner IS NOT NULL";
    database.write("void leases", |connection| Box::pin(sqlx::query(VOID).execute(connection))).await.map(|_| ())
}

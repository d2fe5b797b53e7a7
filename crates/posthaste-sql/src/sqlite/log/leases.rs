//! The statements on `log_group` and `log_member`: the consumer that reads a partition, and its progress.

use std::time::Duration;

use posthaste_core::bus::{Advance, Topics};
use posthaste_core::log::{Leased, Leases, Look, Member, share};
use posthaste_core::{StoreError, lock};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, Row};

use super::LogTables;
use crate::log::{count, key_of, progress, unwritable};
use crate::sqlite::Database;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::errors::doing;
use crate::unreadable::{report, text};

/// The condition that a lease or membership has ended. `?4` is the length of a lease. A lease that ends later than that
/// from now was begun before the clock was set back. Its real end is unknown, so it counts as ended.
fn ended(until: &str) -> String {
    format!("({until} < {NOW_MS} OR {until} > {NOW_MS} + ?4 * 11 / 10)")
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

/// The positions of these columns in [`leased`].
const COMPLETED: usize = 3;
const TOPIC: usize = 4;
const PARTITION: usize = 5;

/// The condition on `log_partition` that selects the topics of a member, and the value of its parameter `?1`.
fn matching(topics: &Topics) -> Result<(&'static str, String), StoreError> {
    match topics {
        Topics::Named(names) => {
            let names =
                serde_json::to_string(names).map_err(|error| unwritable("name the topics of a group", error))?;
            Ok(("topic IN (SELECT value FROM json_each(?1))", names))
        }
        Topics::Prefix(prefix) => Ok(("substr(topic, 1, length(?1)) = ?1", prefix.clone())),
        Topics::PrefixAndNamed(prefix, names) => {
            let all: Vec<&str> = [prefix].into_iter().chain(names).map(String::as_str).collect();
            let all = serde_json::to_string(&all).map_err(|error| unwritable("name the topics of a group", error))?;
            let condition = "(substr(topic, 1, length(?1 ->> 0)) = ?1 ->> 0
                 OR topic IN (SELECT value FROM json_each(?1)))";
            Ok((condition, all))
        }
    }
}

pub(super) async fn look(database: &Database, member: &Member, lease: Duration) -> Result<Look, StoreError> {
    let (matching, topics) = matching(&member.topics)?;
    let sql = format!(
        "SELECT
            EXISTS (
                SELECT 1 FROM log_partition LEFT JOIN log_group ON group_name = ?2 AND partition_id = id
                WHERE {matching} AND (owner IS NULL OR (owner <> ?3 AND {}))),
            (SELECT count(*) FROM log_member WHERE group_name = ?2 AND NOT {}),
            (SELECT count(*) FROM log_partition WHERE {matching})",
        ended("leased_until"),
        ended("alive_until"),
    );
    let query = sqlx::query_as(AssertSqlSafe(sql)).bind(topics).bind(&member.group).bind(&member.owner);
    let query = query.bind(millis(lease)).fetch_one(database.readers());
    let (has_free, members, partitions): (bool, i64, i64) = doing("look for free partitions", query).await?;
    Ok(Look { has_free, members: count(members), partitions: count(partitions) })
}

pub(super) async fn lease(tables: &LogTables, member: &Member, lease: Duration) -> Result<Leases, StoreError> {
    let statements = Statements::of(member, lease)?;
    let (leases, rows) = tables
        .database
        .write_with("lease partitions", statements, |connection, statements| {
            Box::pin(async move { statements.run(connection).await })
        })
        .await?;
    let leased = rows.iter().filter_map(|row| {
        leased(row, &member.group).inspect_err(|error| tables.report(row, &member.group, error)).ok()
    });
    Ok(Leases { leased: leased.collect(), ..leases })
}

/// The statements of one [`lease`], which run in one transaction.
struct Statements {
    member: Member,
    topics: String,
    lease: i64,
    matching: &'static str,
}

impl Statements {
    fn of(member: &Member, lease: Duration) -> Result<Self, StoreError> {
        let (matching, topics) = matching(&member.topics)?;
        Ok(Self { member: member.clone(), topics, lease: millis(lease), matching })
    }

    async fn run(&self, connection: &mut SqliteConnection) -> Result<(Leases, Vec<SqliteRow>), sqlx::Error> {
        let matching = self.matching;
        let heartbeat = format!(
            "INSERT INTO log_member (group_name, owner, alive_until) VALUES (?2, ?3, {NOW_MS} + ?4)
             ON CONFLICT DO UPDATE SET alive_until = excluded.alive_until"
        );
        self.execute(connection, heartbeat).await?;
        let expire =
            format!("DELETE FROM log_member WHERE group_name = ?2 AND owner <> ?3 AND {}", ended("alive_until"));
        self.execute(connection, expire).await?;
        // A group starts at the earliest existing record: records that retention removed could never be acked.
        let join = format!(
            "INSERT INTO log_group (group_name, partition_id, watermark)
             SELECT ?2, id, coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = id), next_offset)
             FROM log_partition WHERE {matching} ON CONFLICT DO NOTHING"
        );
        self.execute(connection, join).await?;
        let renew = format!(
            "UPDATE log_group SET leased_until = {NOW_MS} + ?4
             WHERE group_name = ?2 AND owner = ?3 AND partition_id IN (SELECT id FROM log_partition WHERE {matching})"
        );
        let owned = self.execute(connection, renew).await?;
        let counts = format!(
            "SELECT (SELECT count(*) FROM log_member WHERE group_name = ?2),
                    (SELECT count(*) FROM log_member WHERE group_name = ?2 AND owner < ?3),
                    (SELECT count(*) FROM log_partition WHERE {matching})"
        );
        let counts = sqlx::query_as(AssertSqlSafe(counts)).bind(&self.topics).bind(&self.member.group);
        let (members, rank, partitions): (i64, i64, i64) =
            counts.bind(&self.member.owner).fetch_one(&mut *connection).await?;
        let (members, partitions) = (count(members), count(partitions));
        let share = share(partitions, members, count(rank));
        if let Some(missing) = share.checked_sub(owned).filter(|missing| *missing > 0) {
            let acquire = format!(
                "UPDATE log_group SET generation = generation + 1, owner = ?3, leased_until = {NOW_MS} + ?4
                 WHERE group_name = ?2 AND partition_id IN (
                    SELECT id FROM log_partition JOIN log_group ON group_name = ?2 AND partition_id = id
                    WHERE {matching} AND owner IS NOT ?3 AND (owner IS NULL OR {})
                    ORDER BY id LIMIT {missing})",
                ended("leased_until")
            );
            self.execute(connection, acquire).await?;
        }
        let owned = format!(
            "SELECT partition_id, generation, watermark, completed, topic, partition, next_offset,
                coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = id), next_offset) AS first_offset
             FROM log_group JOIN log_partition ON id = partition_id
             WHERE group_name = ?2 AND owner = ?3 AND {matching}"
        );
        let owned = sqlx::query(AssertSqlSafe(owned)).bind(&self.topics).bind(&self.member.group);
        let rows = owned.bind(&self.member.owner).fetch_all(connection).await?;
        Ok((Leases { leased: Vec::new(), members, partitions, share }, rows))
    }

    async fn execute(&self, connection: &mut SqliteConnection, sql: String) -> Result<usize, sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(sql)).bind(&self.topics).bind(&self.member.group);
        let done = query.bind(&self.member.owner).bind(self.lease).execute(connection).await?;
        Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
    }
}

fn leased(row: &SqliteRow, group: &str) -> Result<Leased, sqlx::Error> {
    let (watermark, partition) = (row.try_get("watermark")?, row.try_get("partition")?);
    let topic: String = row.try_get("topic")?;
    Ok(Leased {
        partition_id: row.try_get("partition_id")?,
        generation: row.try_get("generation")?,
        first_offset: row.try_get("first_offset")?,
        next_offset: row.try_get("next_offset")?,
        progress: progress(watermark, &text(row, COMPLETED), || key_of(group, &topic, partition)),
        topic,
        partition,
    })
}

impl LogTables {
    /// Reports a progress row that cannot be read, once.
    fn report(&self, row: &SqliteRow, group: &str, error: &sqlx::Error) {
        let key = key_of(group, &text(row, TOPIC), text(row, PARTITION));
        if lock(&self.reported).insert(key.clone()) {
            report("log_group", &key, error);
        }
    }
}

pub(super) async fn record(database: &Database, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
    const DOING: &str = "record acks";
    let row = |Advance { partition_id, generation, progress }: &Advance| {
        (*partition_id, *generation, progress.watermark(), progress.encode())
    };
    let rows: Vec<_> = advances.iter().map(row).collect();
    let rows = serde_json::to_string(&rows).map_err(|error| unwritable(DOING, error))?;
    let arguments = (rows, member.group.clone(), member.owner.clone());
    let record = database.write_with(DOING, arguments, |connection, arguments| {
        Box::pin(async move {
            let (rows, group, owner) = &*arguments;
            sqlx::query_scalar(RECORD).bind(rows).bind(group).bind(owner).fetch_all(connection).await
        })
    });
    record.await
}

pub(super) async fn release(database: &Database, member: &Member, partitions: &[i64]) -> Result<(), StoreError> {
    const DOING: &str = "release partitions";
    const RELEASE: &str = "
        UPDATE log_group SET owner = NULL, leased_until = 0
        WHERE group_name = ?1 AND owner = ?2 AND partition_id IN (SELECT value FROM json_each(?3))";
    let partitions = serde_json::to_string(partitions).map_err(|error| unwritable(DOING, error))?;
    let arguments = (member.group.clone(), member.owner.clone(), partitions);
    let release = database.write_with(DOING, arguments, |connection, arguments| {
        Box::pin(async move {
            let (group, owner, partitions) = &*arguments;
            sqlx::query(RELEASE).bind(group).bind(owner).bind(partitions).execute(connection).await
        })
    });
    release.await.map(|_| ())
}

pub(super) async fn leave(database: &Database, member: &Member) -> Result<(), StoreError> {
    const RELEASE: &str = "UPDATE log_group SET owner = NULL, leased_until = 0 WHERE group_name = ?1 AND owner = ?2";
    const LEAVE: &str = "DELETE FROM log_member WHERE group_name = ?1 AND owner = ?2";
    let arguments = (member.group.clone(), member.owner.clone());
    let leave = database.write_with("leave a group", arguments, |connection, arguments| {
        Box::pin(async move {
            let (group, owner) = &*arguments;
            sqlx::query(RELEASE).bind(group).bind(owner).execute(&mut *connection).await?;
            sqlx::query(LEAVE).bind(group).bind(owner).execute(connection).await
        })
    });
    leave.await.map(|_| ())
}

/// Ends the memberships and leases of all consumers of all groups.
pub(super) async fn void(database: &Database) -> Result<(), StoreError> {
    const VOID: &str = "UPDATE log_group SET owner = NULL, leased_until = 0 WHERE owner IS NOT NULL";
    const REMOVE_MEMBERS: &str = "DELETE FROM log_member";
    let void = database.write("void leases", |connection| {
        Box::pin(async move {
            sqlx::query(VOID).execute(&mut *connection).await?;
            sqlx::query(REMOVE_MEMBERS).execute(connection).await
        })
    });
    void.await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

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

//! The statements on `log_group` and `log_member`: the consumer that reads a partition, and its progress.
//!
//! Statements that change several rows of `log_group` lock them in the order of their partitions, because an ack and a
//! renewal of the same consumer run at the same time.

use std::time::Duration;

use posthaste_core::bus::{Advance, Topics};
use posthaste_core::log::{Leased, Leases, Look, Member, share};
use posthaste_core::{StoreError, lock};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, FromRow, PgConnection, Postgres, Row};

use super::{LogTables, STATEMENT_TIMEOUT, WRITE, limited};
use crate::log::{count, key_of, progress};
use crate::postgres::clock::{CLOCK, micros};
use crate::postgres::errors::store_error;
use crate::session::Failed;
use crate::unreadable::{report, text};

/// The members of a group lease partitions one after the other. Two groups with the same hash only wait for each other.
/// No records are removed meanwhile, because a new group starts at the earliest one.
const LOCK_GROUP: &str = "
    SELECT pg_advisory_xact_lock(hashtext('posthaste lease partitions'), hashtext($1)),
        pg_advisory_xact_lock_shared(hashtext('posthaste remove records'), 0)";

/// The condition that a lease or membership has ended. `$4` is the length of a lease in microseconds. A lease that ends
/// later than that from now was begun before the clock was set back. Its real end is unknown, so it counts as ended.
fn ended(until: &str) -> String {
    format!("({until} < {CLOCK} OR {until} > {CLOCK} + $4 * 1.1 * interval '1 microsecond')")
}

/// The end of a lease that begins now.
fn lease_end() -> String {
    format!("{CLOCK} + $4 * interval '1 microsecond'")
}

/// The condition on `log_partition` that selects the topics of a member. `$1` are the prefix, if there is one, and the
/// names.
fn matching(topics: &Topics) -> &'static str {
    match topics {
        Topics::Named(_) => "topic = ANY ($1)",
        Topics::Prefix(_) => "starts_with(topic, ($1)[1])",
        Topics::PrefixAndNamed(..) => "(starts_with(topic, ($1)[1]) OR topic = ANY ($1))",
    }
}

/// Fenced: records progress only if owner and generation are still those under which the records were read. A statement
/// that the server executes late, after its client gave up and recorded more, does not move the progress back. Binds:
/// partitions, generations, watermarks, completed sets, the group, the owner.
///
/// The partitions are also named outside of the joins, so that each is looked up by its key.
pub(super) const RECORD: &str = "
    WITH owned AS MATERIALIZED (
        SELECT log_group.partition_id, done.watermark, done.completed
        FROM log_group
        JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[])
            AS done (partition_id, generation, watermark, completed) ON done.partition_id = log_group.partition_id
        WHERE log_group.group_name = $5 AND log_group.partition_id = ANY ($1)
          AND log_group.owner = $6 AND log_group.generation = done.generation
          AND log_group.watermark <= done.watermark
        ORDER BY log_group.partition_id
        FOR NO KEY UPDATE OF log_group
    )
    UPDATE log_group SET watermark = owned.watermark, completed = owned.completed FROM owned
    WHERE log_group.group_name = $5 AND log_group.partition_id = ANY ($1)
      AND log_group.partition_id = owned.partition_id
    RETURNING log_group.partition_id";

/// Ends the leases of a member on these partitions. Binds: the group, the owner, the partitions; NULL: all of them.
const RELEASE: &str = "
    WITH owned AS MATERIALIZED (
        SELECT partition_id FROM log_group
        WHERE group_name = $1 AND owner = $2 AND ($3::bigint[] IS NULL OR partition_id = ANY ($3))
        ORDER BY partition_id
        FOR NO KEY UPDATE
    )
    UPDATE log_group SET owner = NULL, leased_until = NULL FROM owned
    WHERE log_group.group_name = $1 AND log_group.partition_id = owned.partition_id";

const LEAVE: &str = "DELETE FROM log_member WHERE group_name = $1 AND owner = $2";

pub(super) async fn look(tables: &LogTables, member: &Member, lease: Duration) -> Result<Look, Failed> {
    let statements = Statements::of(member, lease);
    let matching = statements.matching;
    let sql = format!(
        "SELECT
            EXISTS (
                SELECT 1 FROM log_partition LEFT JOIN log_group ON group_name = $2 AND partition_id = id
                WHERE {matching} AND (owner IS NULL OR (owner <> $3 AND {}))),
            (SELECT count(*) FROM log_member WHERE group_name = $2 AND NOT {}),
            (SELECT count(*) FROM log_partition WHERE {matching})",
        ended("leased_until"),
        ended("alive_until"),
    );
    let rows = tables.leases.fetch(statements.query(sql)).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let (has_free, members, partitions) = <(bool, i64, i64)>::from_row(row)?;
    Ok(Look { has_free, members: count(members), partitions: count(partitions) })
}

pub(super) async fn lease(tables: &LogTables, member: &Member, lease: Duration) -> Result<Leases, Failed> {
    let statements = Statements::of(member, lease);
    let mut work = tables.leases.begin(WRITE).await?;
    let (leases, rows) = statements.run(&mut work).await?;
    work.commit().await?;
    let leased = rows.iter().filter_map(|row| {
        leased(row, &member.group).inspect_err(|error| tables.report(row, &member.group, error)).ok()
    });
    Ok(Leases { leased: leased.collect(), ..leases })
}

/// The statements of one [`lease`], which run in one transaction. All have the same binds: the topics, the group, the
/// owner, the length of a lease in microseconds.
struct Statements<'a> {
    member: &'a Member,
    topics: Vec<&'a str>,
    lease: i64,
    matching: &'static str,
}

impl<'a> Statements<'a> {
    fn of(member: &'a Member, lease: Duration) -> Self {
        let (prefix, names) = (member.topics.prefix(), member.topics.names());
        let topics = prefix.into_iter().chain(names.iter().map(String::as_str)).collect();
        Self { member, topics, lease: micros(lease), matching: matching(&member.topics) }
    }

    async fn run(&self, connection: &mut PgConnection) -> Result<(Leases, Vec<PgRow>), sqlx::Error> {
        sqlx::query(LOCK_GROUP).bind(&self.member.group).execute(&mut *connection).await?;
        self.renew_membership(connection).await?;
        let matching = self.matching;
        // A group starts at the earliest existing record: records that retention removed could never be acked.
        let join = format!(
            "INSERT INTO log_group (group_name, partition_id, watermark)
             SELECT $2, id, coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = id), next_offset)
             FROM log_partition
             WHERE {matching} AND NOT EXISTS (SELECT 1 FROM log_group WHERE group_name = $2 AND partition_id = id)
             ON CONFLICT DO NOTHING"
        );
        self.execute(connection, join).await?;
        let renew = format!(
            "WITH owned AS MATERIALIZED (
                SELECT partition_id FROM log_group
                WHERE group_name = $2 AND owner = $3
                  AND partition_id IN (SELECT id FROM log_partition WHERE {matching})
                ORDER BY partition_id
                FOR NO KEY UPDATE OF log_group
             )
             UPDATE log_group SET leased_until = {} FROM owned
             WHERE log_group.group_name = $2 AND log_group.partition_id = owned.partition_id",
            lease_end()
        );
        let owned = self.execute(connection, renew).await?;
        let counts = format!(
            "SELECT (SELECT count(*) FROM log_member WHERE group_name = $2),
                    (SELECT count(*) FROM log_member WHERE group_name = $2 AND owner < $3),
                    (SELECT count(*) FROM log_partition WHERE {matching})"
        );
        let row = self.query(counts).fetch_one(&mut *connection).await?;
        let (members, rank, partitions) = <(i64, i64, i64)>::from_row(&row)?;
        let (members, partitions) = (count(members), count(partitions));
        let share = share(partitions, members, count(rank));
        if let Some(missing) = share.checked_sub(owned).filter(|missing| *missing > 0) {
            self.acquire(connection, missing).await?;
        }
        let owned = format!(
            "SELECT partition_id, generation, watermark, completed, topic, partition, next_offset,
                coalesce((SELECT min(\"offset\") FROM log_record WHERE partition_id = id), next_offset) AS first_offset
             FROM log_group JOIN log_partition ON id = partition_id
             WHERE group_name = $2 AND owner = $3 AND {matching}
             ORDER BY partition_id"
        );
        let rows = self.query(owned).fetch_all(connection).await?;
        Ok((Leases { leased: Vec::new(), members, partitions, share }, rows))
    }

    /// Renews the membership, and ends the memberships of consumers that are gone.
    async fn renew_membership(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let heartbeat = format!(
            "INSERT INTO log_member (group_name, owner, alive_until) VALUES ($2, $3, {})
             ON CONFLICT (group_name, owner) DO UPDATE SET alive_until = excluded.alive_until",
            lease_end()
        );
        self.execute(connection, heartbeat).await?;
        let expire =
            format!("DELETE FROM log_member WHERE group_name = $2 AND owner <> $3 AND {}", ended("alive_until"));
        self.execute(connection, expire).await.map(|_| ())
    }

    /// Leases free partitions. A partition whose row another transaction has locked is skipped: the consumer looks
    /// again soon, and this statement never waits, so it is part of no deadlock.
    async fn acquire(&self, connection: &mut PgConnection, missing: usize) -> Result<(), sqlx::Error> {
        let acquire = format!(
            "WITH free AS MATERIALIZED (
                SELECT partition_id FROM log_group JOIN log_partition ON id = partition_id
                WHERE group_name = $2 AND {} AND (owner IS NULL OR (owner <> $3 AND {}))
                ORDER BY partition_id LIMIT {missing}
                FOR NO KEY UPDATE OF log_group SKIP LOCKED
             )
             UPDATE log_group SET generation = generation + 1, owner = $3, leased_until = {} FROM free
             WHERE log_group.group_name = $2 AND log_group.partition_id = free.partition_id",
            self.matching,
            ended("leased_until"),
            lease_end()
        );
        self.execute(connection, acquire).await.map(|_| ())
    }

    fn query(&self, sql: String) -> Query<'a, Postgres, PgArguments> {
        let query = sqlx::query(AssertSqlSafe(sql)).bind(&self.topics).bind(&self.member.group);
        query.bind(&self.member.owner).bind(self.lease)
    }

    async fn execute(&self, connection: &mut PgConnection, sql: String) -> Result<usize, sqlx::Error> {
        let done = self.query(sql).execute(connection).await?;
        Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
    }
}

fn leased(row: &PgRow, group: &str) -> Result<Leased, sqlx::Error> {
    let watermark = row.try_get("watermark")?;
    let (topic, partition): (String, i32) = (row.try_get("topic")?, row.try_get("partition")?);
    let completed: String = row.try_get("completed")?;
    Ok(Leased {
        partition_id: row.try_get("partition_id")?,
        generation: row.try_get("generation")?,
        first_offset: row.try_get("first_offset")?,
        next_offset: row.try_get("next_offset")?,
        progress: progress(watermark, &completed, || key_of(group, &topic, partition)),
        topic,
        partition: partition.unsigned_abs(),
    })
}

impl LogTables {
    /// Reports a progress row that cannot be read, once.
    fn report(&self, row: &PgRow, group: &str, error: &sqlx::Error) {
        const TOPIC: usize = 4;
        let key = key_of(group, &text(row, TOPIC), row.try_get::<i32, _>("partition").unwrap_or_default());
        if lock(&self.reported).insert(key.clone()) {
            report("log_group", &key, error);
        }
    }
}

pub(super) async fn record(tables: &LogTables, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
    const DOING: &str = "record acks";
    fn column<T>(advances: &[Advance], of: impl Fn(&Advance) -> T) -> Vec<T> {
        advances.iter().map(of).collect()
    }
    let record = sqlx::query(RECORD)
        .bind(column(advances, |advance| advance.partition_id))
        .bind(column(advances, |advance| advance.generation))
        .bind(column(advances, |advance| advance.progress.watermark()))
        .bind(column(advances, |advance| advance.progress.encode()))
        .bind(&member.group)
        .bind(&member.owner);
    let rows = tables.run(DOING, record).await?;
    rows.iter().map(|row| row.try_get(0).map_err(|error| store_error(DOING, error))).collect()
}

pub(super) async fn release(tables: &LogTables, member: &Member, partitions: &[i64]) -> Result<(), StoreError> {
    let release = sqlx::query(RELEASE).bind(&member.group).bind(&member.owner).bind(partitions);
    tables.run("release partitions", release).await.map(|_| ())
}

pub(super) async fn leave(tables: &LogTables, member: &Member) -> Result<(), StoreError> {
    let leave = async {
        let mut work = tables.leases.begin(WRITE).await?;
        let release = sqlx::query(RELEASE).bind(&member.group).bind(&member.owner).bind(None::<Vec<i64>>);
        release.execute(&mut *work).await?;
        sqlx::query(LEAVE).bind(&member.group).bind(&member.owner).execute(&mut *work).await?;
        work.commit().await
    };
    limited("leave a group", STATEMENT_TIMEOUT, leave).await
}

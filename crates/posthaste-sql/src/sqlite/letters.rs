use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::{Claim, Claimed, Settled, Settlement, Source, StoreError, Wakeup};
use serde::Serialize;
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use self::in_flight::InFlight;
use self::settling::Change;
use super::clock::{NOW_MS, millis, span, time};
use super::database::Database;
use super::unreadable::{report, text};
use crate::letters::{Letter, NewLetter, Trigger};

mod in_flight;
mod queries;
mod settling;

/// How many rows one statement inserts.
const CHUNK: usize = 64;

/// Where a claim has the number of the row.
const AFTER_DUE: usize = 14;

/// Later than every time that is ever due, and less than every text.
const LAST_MS: i64 = i64::MAX;

/// The dead letters: a source of those that are to be tried again, and what operators ask about them.
///
/// Each letter is leased on its own row, because any number of processes may retry. What this one has in flight it also
/// knows without the rows: their leases go by the wall clock, which may be set.
#[derive(Clone)]
pub struct Letters(Arc<Shared>);

struct Shared {
    database: Database,
    lease: Duration,
    owner: String,
    claims: AtomicU64,
    in_flight: InFlight,
    /// One claim at a time: between a claim's look at what is in flight and its adding to it, nobody else may claim.
    claiming: tokio::sync::Mutex<()>,
    wakeup: Wakeup,
}

impl Letters {
    /// A new owner of claims on the dead letters of this database.
    pub fn new(database: Database, lease: Duration) -> Self {
        let owner = uuid::Uuid::now_v7().to_string();
        Self(Arc::new(Shared {
            database,
            lease,
            owner,
            claims: AtomicU64::new(0),
            in_flight: InFlight::default(),
            claiming: tokio::sync::Mutex::default(),
            wakeup: Wakeup::default(),
        }))
    }

    /// Keeps letters, each delivery once, and schedules their first retries. Durable when it returns.
    pub async fn intake(&self, letters: Vec<NewLetter>) -> Result<(), StoreError> {
        let with_ids = letters.into_iter().map(|letter| (uuid::Uuid::now_v7().to_string(), letter));
        let letters: Arc<Vec<(String, NewLetter)>> = Arc::new(with_ids.collect());
        let insert = self.0.database.write("keep dead letters", move |connection| {
            let letters = letters.clone();
            Box::pin(async move { insert(connection, &letters).await })
        });
        insert.await?;
        self.0.wakeup.wake();
        Ok(())
    }

    /// Takes the scheduled retries away from letters that had `max_retry` of them already. Letters for which no request was
    /// ever made keep theirs: it is not a retry. For a start with a lower limit than before.
    pub async fn end_schedules(&self, max_retry: u32) -> Result<(), StoreError> {
        const END: &str = "UPDATE dlt_event SET scheduled_at = NULL
             WHERE due IS NOT NULL AND scheduled_at IS NOT NULL AND attempts > 0 AND retry_count >= ?";
        let end = self.0.database.write("end scheduled retries", move |connection| {
            Box::pin(async move { sqlx::query(END).bind(max_retry).execute(connection).await.map(|_| ()) })
        });
        end.await
    }

    /// Frees every letter, whoever holds it. Only for a process that knows itself alone.
    pub async fn void_leases(&self) -> Result<(), StoreError> {
        const VOID: &str = "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL WHERE locked_by IS NOT NULL";
        let void = self.0.database.write("free the dead letters", |connection| {
            Box::pin(async move { sqlx::query(VOID).execute(connection).await.map(|_| ()) })
        });
        void.await
    }
}

async fn insert(connection: &mut SqliteConnection, letters: &[(String, NewLetter)]) -> Result<(), sqlx::Error> {
    for chunk in letters.chunks(CHUNK) {
        let row = format!("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW_MS} + ?, {NOW_MS}, {NOW_MS})");
        let rows = vec![row; chunk.len()].join(", ");
        let mut query = sqlx::query(AssertSqlSafe(format!(
            "INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain,
                 endpoint, envelope, readable, attempts, error, error_code, error_cause, first_failed_at, scheduled_at,
                 created_at, updated_at)
             VALUES {rows} ON CONFLICT (delivery_id) DO NOTHING"
        )));
        for (id, letter) in chunk {
            query = query
                .bind(id)
                .bind(&letter.delivery_id)
                .bind(&letter.event_id)
                .bind(&letter.subscription_id)
                .bind(&letter.subscriber_id)
                .bind(&letter.event_type)
                .bind(&letter.domain)
                .bind(&letter.endpoint)
                .bind(&letter.envelope[..])
                .bind(&letter.readable)
                .bind(letter.attempts)
                .bind(&letter.error)
                .bind(&letter.error_code)
                .bind(&letter.error_cause)
                .bind(letter.first_failed_at.timestamp_millis())
                .bind(letter.first_delay.map(millis));
        }
        query.execute(&mut *connection).await?;
    }
    Ok(())
}

#[async_trait]
impl Source for Letters {
    type Item = Letter;

    async fn claim(&self, limit: usize) -> Result<Claim<Letter>, StoreError> {
        let _one_at_a_time = self.0.claiming.lock().await;
        let started = Instant::now();
        let left_out = Arc::new(self.0.in_flight.ids(started));
        // Unique per claim, not only per process: a claim that expired and was made again fences its elder.
        let lock = format!("{}:{}", self.0.owner, self.0.claims.fetch_add(1, Ordering::Relaxed));
        let lease = millis(self.0.lease);
        let claim = self.0.database.write("claim dead letters", move |connection| {
            let (lock, left_out) = (lock.clone(), left_out.clone());
            Box::pin(async move { claim(connection, lock, lease, &left_out, limit).await })
        });
        let (claim, unreadable) = claim.await?;
        unreadable.iter().for_each(|(key, reason)| report("dlt_event", key, reason));
        self.0.in_flight.add(claim.items.iter().map(|claimed| &claimed.item), started + self.0.lease);
        Ok(claim)
    }

    async fn settle(&self, settlements: &[Settlement<'_, Letter>]) -> Result<Vec<Settled>, StoreError> {
        let changes: Arc<Vec<Change>> = Arc::new(settlements.iter().map(Change::of).collect());
        let settle = self.0.database.write("settle dead letters", move |connection| {
            let changes = changes.clone();
            Box::pin(async move { settling::record(connection, &changes).await })
        });
        let settled = settle.await?;
        self.0.in_flight.remove(settlements.iter().map(|settlement| &settlement.claimed.item));
        Ok(settled)
    }

    async fn renew(&self, held: &[&Claimed<Letter>]) -> Result<Vec<Settled>, StoreError> {
        let claimed = held;
        let held = Arc::new(Held::of(claimed));
        let (started, lease) = (Instant::now(), millis(self.0.lease));
        let renew = self.0.database.write("renew the leases of dead letters", move |connection| {
            let held = held.clone();
            Box::pin(async move {
                let sql = format!(
                    "UPDATE dlt_event SET locked_until = {NOW_MS} + ?2
                     FROM (SELECT value ->> 'id' AS id, value ->> 'lock' AS lock FROM json_each(?1)) AS held
                     WHERE dlt_event.id = held.id AND dlt_event.locked_by = held.lock
                     RETURNING dlt_event.id"
                );
                let query = sqlx::query(AssertSqlSafe(sql)).bind(json(&*held)?).bind(lease);
                let rows = query.fetch_all(connection).await?;
                let renewed = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?;
                Ok(held.iter().map(|held| settled(renewed.contains(&held.id))).collect::<Vec<_>>())
            })
        });
        let renewed = renew.await?;
        for (claimed, renewed) in claimed.iter().zip(&renewed) {
            match renewed {
                Settled::Applied => self.0.in_flight.extend(&claimed.item, started + self.0.lease),
                Settled::LostLease => self.0.in_flight.remove([&claimed.item]),
                Settled::Locked => {}
            }
        }
        Ok(renewed)
    }

    async fn release(&self, held: &[&Claimed<Letter>]) -> Result<(), StoreError> {
        let claimed = held;
        let held = Arc::new(Held::of(claimed));
        let release = self.0.database.write("release dead letters", move |connection| {
            let held = held.clone();
            Box::pin(async move {
                let release = "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL
                     FROM (SELECT value ->> 'id' AS id, value ->> 'lock' AS lock FROM json_each(?)) AS held
                     WHERE dlt_event.id = held.id AND dlt_event.locked_by = held.lock";
                sqlx::query(release).bind(json(&*held)?).execute(connection).await.map(|_| ())
            })
        });
        release.await?;
        self.0.in_flight.remove(claimed.iter().map(|claimed| &claimed.item));
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        let owner = self.0.owner.clone();
        let close = self.0.database.write("release dead letters", move |connection| {
            let owner = owner.clone();
            Box::pin(async move {
                // The claims of this owner: `;` follows `:`, which ends the owner's id.
                let release = "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL
                     WHERE locked_by > ?1 || ':' AND locked_by < ?1 || ';'";
                sqlx::query(release).bind(owner).execute(connection).await.map(|_| ())
            })
        });
        close.await?;
        self.0.in_flight.clear();
        Ok(())
    }

    /// No code of a user runs in its sink.
    fn renews_on_own_thread(&self) -> bool {
        false
    }

    fn lease(&self) -> Duration {
        self.0.lease
    }

    fn wakeup(&self) -> &Wakeup {
        &self.0.wakeup
    }
}

/// The key of a letter that cannot be read, and why.
type Unreadable = (String, String);

async fn claim(
    connection: &mut SqliteConnection,
    lock: String,
    lease: i64,
    left_out: &[String],
    limit: usize,
) -> Result<(Claim<Letter>, Vec<Unreadable>), sqlx::Error> {
    let free =
        format!("(locked_until IS NULL OR locked_until <= {NOW_MS}) AND id NOT IN (SELECT value FROM json_each(?1))");
    let take = format!(
        "UPDATE dlt_event SET locked_by = ?2, locked_until = {NOW_MS} + ?3
         WHERE id IN (SELECT id FROM dlt_event WHERE due <= {NOW_MS} AND {free} ORDER BY due, id LIMIT ?4)
         RETURNING id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint, envelope, attempts,
             retry_count, first_failed_at, replay_at IS NOT NULL, replay_id, due, rowid"
    );
    let limit_bound = i64::try_from(limit).unwrap_or(i64::MAX);
    let left_out = json(&left_out)?;
    let query = sqlx::query(AssertSqlSafe(take)).bind(left_out.clone()).bind(lock.clone()).bind(lease);
    let rows = query.bind(limit_bound).fetch_all(&mut *connection).await?;
    let (mut claimed, mut unreadable) = (Vec::with_capacity(rows.len()), Vec::new());
    for row in &rows {
        match read(row, &lock) {
            Ok(letter) => claimed.push(letter),
            Err(error) => {
                let reason = error.to_string();
                give_up(connection, row.try_get(AFTER_DUE)?, &reason).await?;
                unreadable.push((text(row, 0), reason));
            }
        }
    }
    // An UPDATE returns its rows in no order of ours.
    claimed.sort_by(|(due, a), (other_due, b)| (due, &a.item.id).cmp(&(other_due, &b.item.id)));
    let mut next_due = None;
    if rows.len() < limit {
        // A due time that is no number sorts behind all numbers and is never due.
        let next = format!(
            "SELECT CAST(due - {NOW_MS} AS INTEGER) FROM dlt_event
             WHERE due IS NOT NULL AND due <= {LAST_MS} AND {free} ORDER BY due, id LIMIT 1"
        );
        let row = sqlx::query(AssertSqlSafe(next)).bind(left_out).fetch_optional(connection).await?;
        next_due = row.map(|row| row.try_get(0)).transpose()?.map(span);
    }
    let items: Vec<_> = claimed.into_iter().map(|(_, claimed)| claimed).collect();
    // Unreadable letters made a full claim look short.
    let next_due = if rows.len() < limit { next_due } else { Some(Duration::ZERO).filter(|_| items.len() < limit) };
    Ok((Claim { items, next_due }, unreadable))
}

/// A letter that cannot be read waits for an operator: no claim meets it again.
async fn give_up(connection: &mut SqliteConnection, rowid: i64, reason: &str) -> Result<(), sqlx::Error> {
    let give_up = format!(
        "UPDATE dlt_event SET status = 2, scheduled_at = NULL, replay_at = NULL, replay_id = NULL, locked_by = NULL,
             locked_until = NULL, error = ?2, error_code = 'unreadable', error_cause = NULL, updated_at = {NOW_MS}
         WHERE rowid = ?1"
    );
    sqlx::query(AssertSqlSafe(give_up)).bind(rowid).bind(reason).execute(connection).await.map(|_| ())
}

fn read(row: &SqliteRow, lock: &str) -> Result<(i64, Claimed<Letter>), sqlx::Error> {
    let trigger = match row.try_get(11)? {
        true => Trigger::Replay { replay_id: row.try_get::<Option<String>, _>(12)?.unwrap_or_default() },
        false => Trigger::Scheduled,
    };
    let retry_count: u32 = row.try_get(9)?;
    // Somebody asked for one more try, so one it is, whatever was spent before.
    let (attempt, budget) = match trigger {
        Trigger::Scheduled => (retry_count.saturating_add(1), None),
        Trigger::Replay { .. } => (1, Some(1)),
    };
    let letter = Letter {
        id: row.try_get(0)?,
        trigger,
        event_id: row.try_get(1)?,
        subscription_id: row.try_get(2)?,
        subscriber_id: row.try_get(3)?,
        event_type: row.try_get(4)?,
        domain: row.try_get(5)?,
        endpoint: row.try_get(6)?,
        envelope: Bytes::from(row.try_get::<Vec<u8>, _>(7)?),
        attempts: row.try_get(8)?,
        retry_count,
        first_failed_at: time(row.try_get(10)?),
        lock: lock.to_owned(),
    };
    let bytes = letter.envelope.len() + 512;
    Ok((row.try_get(13)?, Claimed { budget, ..Claimed::new(letter, attempt, bytes) }))
}

/// What identifies a claim of a letter to the database.
#[derive(Clone, Serialize)]
struct Held {
    id: String,
    lock: String,
}

impl Held {
    fn of(claimed: &[&Claimed<Letter>]) -> Vec<Self> {
        claimed.iter().map(|claimed| Self { id: claimed.item.id.clone(), lock: claimed.item.lock.clone() }).collect()
    }
}

fn settled(applied: bool) -> Settled {
    match applied {
        true => Settled::Applied,
        false => Settled::LostLease,
    }
}

fn json(rows: &impl Serialize) -> Result<String, sqlx::Error> {
    serde_json::to_string(rows).map_err(|error| sqlx::Error::Encode(error.into()))
}

use std::process::Command;
use std::time::Duration;

use async_trait::async_trait;
use chrono::TimeDelta;
use posthaste::Mode;
use posthaste::sqlite::OutboxStore;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{SqliteConnection, SqlitePool, Transaction};
use tempfile::TempDir;

use super::{Database, Harness, Tamper, sql_access};

pub struct Sqlite {
    folder: TempDir,
    outsider: SqlitePool,
}

fn options(folder: &TempDir) -> SqliteConnectOptions {
    let options = SqliteConnectOptions::new().filename(folder.path().join("service.db"));
    options.create_if_missing(true).busy_timeout(Duration::from_secs(20))
}

#[async_trait]
impl Harness for Sqlite {
    type Store = OutboxStore;
    type Pool = SqlitePool;
    type Plain = Transaction<'static, sqlx::Sqlite>;

    const TICK: TimeDelta = TimeDelta::milliseconds(1);
    /// In the other modes a claim leases rows and must write, and SQLite allows one writer at a time.
    const CLAIMS_BESIDE_A_WRITER: &'static [Mode] = &[Mode::SingleNode];

    async fn start() -> Self {
        let folder = TempDir::new().unwrap();
        let outsider = SqlitePoolOptions::new().max_connections(1).connect_with(options(&folder)).await.unwrap();
        Self { folder, outsider }
    }

    async fn pool(&self) -> SqlitePool {
        SqlitePoolOptions::new().max_connections(5).connect_with(options(&self.folder)).await.unwrap()
    }

    async fn begin_plain(pool: &SqlitePool) -> Self::Plain {
        pool.begin().await.unwrap()
    }

    async fn commit_plain(transaction: Self::Plain) {
        transaction.commit().await.unwrap();
    }

    fn in_use(pool: &SqlitePool) -> usize {
        (pool.size() as usize).saturating_sub(pool.num_idle())
    }

    async fn tamper(&self, tamper: Tamper<'_>) {
        let tampered = match tamper {
            Tamper::BreakHeaders { event_id } => {
                sqlx::query("UPDATE outbox_event SET headers = 'no JSON' WHERE event_id = ?").bind(event_id)
            }
            Tamper::SetClockBack { by } => {
                let rows = "UPDATE outbox_event SET locked_at = strftime('%Y-%m-%dT%H:%M:%fZ', locked_at, ?)";
                let later = format!("+{} seconds", by.as_secs_f64());
                sqlx::query(rows).bind(later).execute(&self.outsider).await.unwrap();
                sqlx::query("UPDATE outbox_event_owner SET leased_until = leased_until + ?").bind(by.as_millis() as i64)
            }
            Tamper::Age { event_id, by } => sqlx::query(
                "UPDATE outbox_event SET created_at = strftime('%Y-%m-%dT%H:%M:%fZ', created_at, ?2),
                     done_at = strftime('%Y-%m-%dT%H:%M:%fZ', done_at, ?2),
                     locked_at = strftime('%Y-%m-%dT%H:%M:%fZ', locked_at, ?2)
                 WHERE event_id = ?1",
            )
            .bind(event_id)
            .bind(format!("-{} seconds", by.as_secs_f64())),
        };
        assert_eq!(tampered.execute(&self.outsider).await.unwrap().rows_affected(), 1);
    }
}

sql_access!(Sqlite, SqliteConnection);

impl Database for Sqlite {
    const UTC: &'static str = "Z";

    fn client(&self) -> Command {
        let mut sqlite = Command::new("sqlite3");
        sqlite.arg(self.folder.path().join("service.db"));
        sqlite
    }

    fn numbers(count: u64) -> String {
        format!(
            "(WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
              SELECT n FROM numbers)"
        )
    }

    fn ago(age: Duration) -> String {
        format!("strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{} seconds')", age.as_secs())
    }

    fn zeros(count: usize) -> String {
        format!("zeroblob({count})")
    }

    fn digits(count: usize) -> String {
        format!("hex(zeroblob({}))", count / 2)
    }
}

use std::process::Command;
use std::time::Duration;

use async_trait::async_trait;
use posthaste::mysql::OutboxStore;
use posthaste_backend_tests::servers;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{MySqlConnection, MySqlPool, Transaction};

use super::{Database, Harness, Tamper, sql_access};

pub struct MySql {
    url: String,
    outsider: MySqlPool,
}

#[async_trait]
impl Harness for MySql {
    type Store = OutboxStore;
    type Pool = MySqlPool;
    type Plain = Transaction<'static, sqlx::MySql>;

    async fn start() -> Self {
        let url = servers::mariadb().await;
        let outsider = MySqlPoolOptions::new().max_connections(1).connect(&url).await.unwrap();
        Self { url, outsider }
    }

    async fn pool(&self) -> MySqlPool {
        MySqlPoolOptions::new().max_connections(5).connect(&self.url).await.unwrap()
    }

    async fn begin_plain(pool: &MySqlPool) -> Self::Plain {
        pool.begin().await.unwrap()
    }

    async fn commit_plain(transaction: Self::Plain) {
        transaction.commit().await.unwrap();
    }

    fn in_use(pool: &MySqlPool) -> usize {
        (pool.size() as usize).saturating_sub(pool.num_idle())
    }

    async fn tamper(&self, tamper: Tamper<'_>) {
        let tampered = match tamper {
            Tamper::BreakHeaders { event_id } => {
                sqlx::query("UPDATE outbox_event SET headers = 'no JSON' WHERE event_id = ?").bind(event_id)
            }
            Tamper::SetClockBack { by } => {
                let by = by.as_micros() as i64;
                let rows = "UPDATE outbox_event SET locked_at = locked_at + INTERVAL ? MICROSECOND";
                sqlx::query(rows).bind(by).execute(&self.outsider).await.unwrap();
                sqlx::query("UPDATE outbox_event_owner SET leased_until = leased_until + INTERVAL ? MICROSECOND")
                    .bind(by)
            }
            Tamper::Age { event_id, by } => {
                let by = by.as_micros() as i64;
                sqlx::query(
                    "UPDATE outbox_event SET created_at = created_at - INTERVAL ? MICROSECOND,
                         done_at = done_at - INTERVAL ? MICROSECOND, locked_at = locked_at - INTERVAL ? MICROSECOND
                     WHERE event_id = ?",
                )
                .bind(by)
                .bind(by)
                .bind(by)
                .bind(event_id)
            }
        };
        assert_eq!(tampered.execute(&self.outsider).await.unwrap().rows_affected(), 1);
    }
}

sql_access!(MySql, MySqlConnection);

impl Database for MySql {
    const BACKSLASH: &'static str = "\\\\";
    const HUGE: usize = 16_000_000;

    const UTC: &'static str = "";

    fn client(&self) -> Command {
        let (server, database) = self.url.rsplit_once('/').unwrap();
        let (_, port) = server.rsplit_once(':').unwrap();
        let mut mariadb = Command::new("mariadb");
        mariadb.args(["--no-defaults", "-h", "127.0.0.1", "-u", "root", "-P", port, database, "-e"]);
        mariadb
    }

    fn numbers(count: u64) -> String {
        format!("(SELECT seq AS n FROM seq_1_to_{count}) AS numbers")
    }

    fn ago(age: Duration) -> String {
        format!("UTC_TIMESTAMP(6) - INTERVAL {} SECOND", age.as_secs())
    }

    fn zeros(count: usize) -> String {
        format!("REPEAT(CHAR(0), {count})")
    }

    fn digits(count: usize) -> String {
        format!("REPEAT('7', {count})")
    }
}

use std::process::Command;
use std::time::Duration;

use async_trait::async_trait;
use posthaste::postgres::OutboxStore;
use posthaste_backend_tests::servers;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool, Transaction};

use super::{Database, Harness, Tamper, sql_access};

pub struct Postgres {
    pub url: String,
    outsider: PgPool,
}

#[async_trait]
impl Harness for Postgres {
    type Store = OutboxStore;
    type Pool = PgPool;
    type Plain = Transaction<'static, sqlx::Postgres>;

    async fn start() -> Self {
        let url = servers::postgres().await;
        let outsider = PgPoolOptions::new().max_connections(1).connect(&url).await.unwrap();
        Self { url, outsider }
    }

    async fn pool(&self) -> PgPool {
        PgPoolOptions::new().max_connections(5).connect(&self.url).await.unwrap()
    }

    async fn begin_plain(pool: &PgPool) -> Self::Plain {
        pool.begin().await.unwrap()
    }

    async fn commit_plain(transaction: Self::Plain) {
        transaction.commit().await.unwrap();
    }

    fn in_use(pool: &PgPool) -> usize {
        (pool.size() as usize).saturating_sub(pool.num_idle())
    }

    async fn tamper(&self, tamper: Tamper<'_>) {
        let tampered = match tamper {
            Tamper::BreakHeaders { event_id } => {
                sqlx::query("UPDATE outbox_event SET headers = 'no JSON' WHERE event_id = $1").bind(event_id)
            }
            Tamper::SetClockBack { by } => {
                let by = by.as_micros() as i64;
                let rows = "UPDATE outbox_event SET locked_at = locked_at + $1 * interval '1 microsecond'";
                sqlx::query(rows).bind(by).execute(&self.outsider).await.unwrap();
                sqlx::query("UPDATE outbox_event_owner SET leased_until = leased_until + $1 * interval '1 microsecond'")
                    .bind(by)
            }
            Tamper::Age { event_id, by } => sqlx::query(
                "UPDATE outbox_event SET created_at = created_at - $2 * interval '1 microsecond',
                     done_at = done_at - $2 * interval '1 microsecond',
                     locked_at = locked_at - $2 * interval '1 microsecond'
                 WHERE event_id = $1",
            )
            .bind(event_id)
            .bind(by.as_micros() as i64),
        };
        assert_eq!(tampered.execute(&self.outsider).await.unwrap().rows_affected(), 1);
    }
}

sql_access!(Postgres, PgConnection);

impl Database for Postgres {
    const UTC: &'static str = "+00";

    fn client(&self) -> Command {
        let mut psql = Command::new("psql");
        psql.args([&self.url, "-q", "-v", "ON_ERROR_STOP=1", "-c"]);
        psql
    }

    fn numbers(count: u64) -> String {
        format!("generate_series(1, {count}) AS numbers (n)")
    }

    fn ago(age: Duration) -> String {
        format!("clock_timestamp() - interval '{} seconds'", age.as_secs())
    }

    fn zeros(count: usize) -> String {
        format!("decode(repeat('00', {count}), 'hex')")
    }

    fn digits(count: usize) -> String {
        format!("repeat('7', {count})")
    }
}

//! Reads the outbox table as an operator would.

use std::collections::BTreeSet;

use posthaste::DatabaseKind;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, MySqlConnection, PgConnection, query_scalar};

use crate::process::PATIENCE;

/// The ids of the events that are done.
pub async fn done(url: &str) -> BTreeSet<String> {
    const DONE: &str = "SELECT event_id FROM outbox_event WHERE status = 1";
    let ids: Vec<String> = match DatabaseKind::of_url(url).expect("a known database") {
        DatabaseKind::Postgres => {
            let mut connection = PgConnection::connect(url).await.unwrap();
            query_scalar(DONE).fetch_all(&mut connection).await.unwrap()
        }
        DatabaseKind::MySql => {
            let mut connection = MySqlConnection::connect(url).await.unwrap();
            query_scalar(DONE).fetch_all(&mut connection).await.unwrap()
        }
        DatabaseKind::Sqlite => {
            let options: SqliteConnectOptions = url.parse().unwrap();
            let mut connection = options.busy_timeout(PATIENCE).connect().await.unwrap();
            query_scalar(DONE).fetch_all(&mut connection).await.unwrap()
        }
    };
    ids.into_iter().collect()
}

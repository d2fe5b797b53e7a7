//! The migrations of a hub, up and down, printed, interrupted, and as older and newer programs see them.

use std::time::Duration;

use futures_util::future::join_all;
use posthaste_core::hub_store::{Fit, HubDatabase as _, MigrationState, Migrations, OpenError};
use posthaste_core::outbox::{Mode, Reader};
use posthaste_sql::TableName;
use posthaste_sql::postgres::{HubDatabase, MIN_CONNECTIONS, hub_migrations};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::support::{Postgres, event, open};

/// The migration that creates the outbox table.
const OUTBOX: i64 = 6;
const CATALOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/postgres/hub/schema.txt");

async fn database(postgres: &Postgres) -> HubDatabase {
    HubDatabase::open(&postgres.url, MIN_CONNECTIONS).await.unwrap()
}

fn newest() -> i64 {
    hub_migrations().len() as i64
}

#[tokio::test]
async fn the_recorded_catalog_is_that_of_a_new_database() {
    let database = database(&Postgres::start().await).await;
    database.migrate().await.unwrap();
    let found: String = database.catalog().await.unwrap().into_iter().map(|line| line + "\n").collect();
    if std::env::var_os("POSTHASTE_WRITE_CATALOG").is_some() {
        std::fs::write(CATALOG, &found).unwrap();
    }
    let recorded = std::fs::read_to_string(CATALOG).unwrap();
    assert!(recorded == found, "the schema has changed: run this test with POSTHASTE_WRITE_CATALOG=1");
    assert_eq!(database.missing().await.unwrap(), [""; 0]);
}

#[tokio::test]
async fn every_migration_goes_up_down_and_up_again() {
    let postgres = Postgres::start().await;
    let database = database(&postgres).await;
    for number in 1..=newest() {
        database.up(number).await.unwrap();
        database.down(number - 1).await.unwrap();
        database.up(number).await.unwrap();
        let schema = database.schema().await.unwrap();
        assert_eq!((schema.found, schema.known), (Some(number), newest()));
        assert_eq!(schema.fit == Fit::Works, number == newest());
    }
    let list = database.list().await.unwrap();
    assert!(list.iter().all(|migration| matches!(migration.state, MigrationState::Applied(Some(_)))), "{list:?}");
    let deleted = database.tables_above(OUTBOX - 1).await.unwrap();
    let names: Vec<&str> = deleted.iter().map(|table| table.table.as_str()).collect();
    assert_eq!(names, ["audit_log", "outbox_event", "outbox_event_owner"]);
    database.down(0).await.unwrap();
    assert_eq!(database.catalog().await.unwrap(), [""; 0], "nothing is left");
    database.migrate().await.unwrap();
    assert_eq!(database.missing().await.unwrap(), [""; 0]);
}

#[tokio::test]
async fn printed_migrations_make_the_same_database_and_delete_it() {
    let (printed, migrated) = (Postgres::start().await, Postgres::start().await);
    for migration in hub_migrations() {
        printed.pool.execute(AssertSqlSafe(migration.up)).await.unwrap();
    }
    database(&migrated).await.migrate().await.unwrap();
    assert_eq!(database(&printed).await.missing().await.unwrap(), [""; 0]);
    for history in ["posthaste_migration", "outbox_event_migration"] {
        let rows = format!(
            "SELECT string_agg(version || description || encode(checksum, 'hex'), ' ' ORDER BY version) FROM {history}"
        );
        let rows = async |postgres: &Postgres| -> String {
            sqlx::query_scalar(AssertSqlSafe(rows.clone())).fetch_one(&postgres.pool).await.unwrap()
        };
        assert_eq!(rows(&printed).await, rows(&migrated).await);
    }
    for migration in hub_migrations().into_iter().rev() {
        migrated.pool.execute(AssertSqlSafe(migration.down)).await.unwrap();
    }
    assert_eq!(database(&migrated).await.catalog().await.unwrap(), [""; 0]);
}

/// Before the outbox table belonged to the migrations of the hub, a server created it at its start.
#[tokio::test]
async fn an_outbox_table_that_an_earlier_program_made_is_kept() {
    let postgres = Postgres::start().await;
    let database = database(&postgres).await;
    database.up(5).await.unwrap();
    let outbox = open(postgres.pool.clone(), TableName::default(), Reader::Channels, Mode::MultiNode).await.unwrap();
    postgres.write(&outbox, &[&event("1", "t", "{}")]).await;
    database.migrate().await.unwrap();
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM outbox_event").await, 1);
    assert_eq!(database.missing().await.unwrap(), [""; 0]);
}

#[tokio::test]
async fn a_newer_schema_is_accepted_if_it_is_compatible() {
    let postgres = Postgres::start().await;
    let database = database(&postgres).await;
    database.migrate().await.unwrap();
    let add = |description: String| {
        AssertSqlSafe(format!(
            "INSERT INTO posthaste_migration (version, description, success, checksum, execution_time)
             SELECT max(version) + 1, '{description}', true, '\\x00', -1 FROM posthaste_migration"
        ))
    };
    postgres.pool.execute(add(format!("future (compatible with {})", newest()))).await.unwrap();
    database.migrate().await.unwrap();
    database.up(newest()).await.unwrap();
    let newer = database.list().await.unwrap().pop().unwrap();
    assert!(newer.name == "future" && !newer.is_known, "{newer:?}");
    let error = database.down(0).await.unwrap_err();
    assert!(matches!(error, OpenError::NewerSchema { .. }), "a program cannot revert what it does not know: {error}");
    postgres.pool.execute(add(format!("future (compatible with {})", newest() + 1))).await.unwrap();
    let error = database.migrate().await.unwrap_err();
    assert!(matches!(error, OpenError::NewerSchema { found, .. } if found == newest() + 2), "{error}");
}

#[tokio::test]
async fn what_the_schema_lacks_is_named() {
    let postgres = Postgres::start().await;
    let database = database(&postgres).await;
    database.migrate().await.unwrap();
    postgres
        .execute(
            "DROP TABLE sealing; DROP INDEX log_record_key; DROP TRIGGER dlt_event_moved ON dlt_event;
             ALTER TABLE channel DROP COLUMN created_at; ALTER TABLE replay ALTER COLUMN matched TYPE numeric;
             ALTER FUNCTION dlt_count RENAME TO other; ALTER TABLE channel ADD COLUMN of_a_newer_program text",
        )
        .await;
    let missing = [
        "column channel.created_at is missing",
        "column replay.matched is \"numeric not null\", expected \"bigint not null\"",
        "table sealing is missing",
        "function dlt_count(of_status smallint, change bigint) is missing",
        "index log_record.log_record_key is missing",
        "trigger dlt_event.dlt_event_moved is missing",
    ];
    assert_eq!(database.missing().await.unwrap(), missing);
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_start_at_once_migrate_once() {
    let postgres = Postgres::start().await;
    let start = || async { database(&postgres).await.migrate().await.unwrap() };
    join_all((0..6).map(|_| start())).await;
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM posthaste_migration").await, newest());
}

/// Blocks the migrations at their entry in the history: they can read it, and not write it.
async fn block(postgres: &Postgres) -> PgConnection {
    database(postgres).await.up(2).await.unwrap();
    let mut blocker = PgConnection::connect(&postgres.url).await.unwrap();
    blocker.execute("BEGIN; LOCK TABLE posthaste_migration IN SHARE MODE").await.unwrap();
    blocker
}

const BLOCKED: &str = "SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%posthaste_migration%'";

async fn wait_for_blocked(postgres: &Postgres) -> i32 {
    loop {
        if let Some(pid) = sqlx::query_scalar(BLOCKED).fetch_optional(&postgres.pool).await.unwrap() {
            return pid;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_was_cut_off_continues_at_the_next_start() {
    let postgres = Postgres::start().await;
    let mut blocker = block(&postgres).await;
    let cut_off = tokio::spawn({
        let database = database(&postgres).await;
        async move { database.migrate().await }
    });
    let pid = wait_for_blocked(&postgres).await;
    // Its statements have run, and their transaction has not ended.
    sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&postgres.pool).await.unwrap();
    let error = cut_off.await.unwrap().unwrap_err();
    assert!(matches!(error, OpenError::Migration(_)), "{error}");
    blocker.execute("ROLLBACK").await.unwrap();
    let database = database(&postgres).await;
    assert_eq!(database.schema().await.unwrap().found, Some(2));
    database.migrate().await.unwrap();
    assert_eq!(database.missing().await.unwrap(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_gives_way_to_others_that_wait_for_the_same_table() {
    let postgres = Postgres::start().await;
    let mut blocker = block(&postgres).await;
    let migrating = tokio::spawn({
        let database = database(&postgres).await;
        async move { database.migrate().await }
    });
    wait_for_blocked(&postgres).await;
    // It gives up its place in the queue although the table is still locked.
    while sqlx::query(BLOCKED).fetch_optional(&postgres.pool).await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(!migrating.is_finished(), "it tries again");
    blocker.execute("ROLLBACK").await.unwrap();
    migrating.await.unwrap().unwrap();
    assert_eq!(database(&postgres).await.missing().await.unwrap(), [""; 0]);
}

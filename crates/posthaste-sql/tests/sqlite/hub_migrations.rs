//! The migrations of a hub, up and down, printed, and as older and newer programs see them.

use posthaste_core::hub_store::{Fit, HubDatabase as _, MigrationState, Migrations, OpenError};
use posthaste_core::outbox::Mode;
use posthaste_sql::sqlite::{HubDatabase, hub_migrations};
use sqlx::AssertSqlSafe;

use crate::support::{File, event, execute};

/// The migration that creates the outbox table.
const OUTBOX: i64 = 5;
const CATALOG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/sqlite/hub/schema.txt");

async fn database(file: &File) -> HubDatabase {
    HubDatabase::open_shared(&file.url()).await.unwrap()
}

fn newest() -> i64 {
    hub_migrations().len() as i64
}

async fn run(file: &File, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&file.pool().await).await.unwrap();
}

#[tokio::test]
async fn the_recorded_catalog_is_that_of_a_new_database() {
    let file = File::new();
    let database = database(&file).await;
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
    let file = File::new();
    let database = database(&file).await;
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
    let (printed, migrated) = (File::new(), File::new());
    for migration in hub_migrations() {
        run(&printed, migration.up).await;
    }
    database(&migrated).await.migrate().await.unwrap();
    assert_eq!(database(&printed).await.missing().await.unwrap(), [""; 0]);
    const HISTORIES: [&str; 2] = [
        "SELECT group_concat(version || description || hex(checksum)) FROM posthaste_migration",
        "SELECT group_concat(version || description || hex(checksum)) FROM outbox_event_migration",
    ];
    for history in HISTORIES {
        assert_eq!(printed.ask::<String>(history).await, migrated.ask::<String>(history).await);
    }
    for migration in hub_migrations().into_iter().rev() {
        run(&migrated, migration.down).await;
    }
    assert_eq!(database(&migrated).await.catalog().await.unwrap(), [""; 0]);
}

/// Before the outbox table belonged to the migrations of the hub, a server created it at its start.
#[tokio::test]
async fn an_outbox_table_that_an_earlier_program_made_is_kept() {
    let file = File::new();
    let database = database(&file).await;
    database.up(4).await.unwrap();
    let outbox = file.channels(Mode::SingleNode).await;
    outbox.store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
    database.migrate().await.unwrap();
    assert_eq!(file.ask::<i64>("SELECT count(*) FROM outbox_event").await, 1);
    assert_eq!(database.missing().await.unwrap(), [""; 0]);
}

#[tokio::test]
async fn a_newer_schema_is_accepted_if_it_is_compatible() {
    let file = File::new();
    let database = database(&file).await;
    database.migrate().await.unwrap();
    let add = |description: String| {
        format!(
            "INSERT INTO posthaste_migration (version, description, success, checksum, execution_time)
             SELECT max(version) + 1, '{description}', true, x'00', -1 FROM posthaste_migration"
        )
    };
    run(&file, add(format!("future (compatible with {})", newest()))).await;
    database.migrate().await.unwrap();
    database.up(newest()).await.unwrap();
    let newer = database.list().await.unwrap().pop().unwrap();
    assert!(newer.name == "future" && !newer.is_known, "{newer:?}");
    let error = database.down(0).await.unwrap_err();
    assert!(matches!(error, OpenError::NewerSchema { .. }), "a program cannot revert what it does not know: {error}");
    run(&file, add(format!("future (compatible with {})", newest() + 1))).await;
    let error = database.migrate().await.unwrap_err();
    assert!(matches!(error, OpenError::NewerSchema { found, .. } if found == newest() + 2), "{error}");
}

#[tokio::test]
async fn what_the_schema_lacks_is_named() {
    let file = File::new();
    let database = database(&file).await;
    database.migrate().await.unwrap();
    execute(
        database.database(),
        "DROP TABLE sealing; DROP INDEX log_record_key; DROP TRIGGER dlt_event_moved;
         ALTER TABLE replay DROP COLUMN reason; ALTER TABLE channel ADD COLUMN of_a_newer_program text",
    )
    .await;
    let missing = [
        "column replay.reason is missing",
        "table sealing is missing",
        "index log_record.log_record_key is missing",
        "trigger dlt_event.dlt_event_moved is missing",
    ];
    assert_eq!(database.missing().await.unwrap(), missing);
}

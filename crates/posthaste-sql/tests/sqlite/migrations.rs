use posthaste_core::outbox::{self, Mode, OperatorStore};
use posthaste_sql::TableName;
use posthaste_sql::sqlite::migrations;
use sqlx::AssertSqlSafe;

use crate::support::{File, event, execute};

#[tokio::test]
async fn the_outbox_migrates_down_and_up_again() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::ORDERED).await;
    outbox.store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
    let printed = migrations(&TableName::default(), Mode::ORDERED);
    assert_eq!(printed.iter().map(|migration| migration.name).collect::<Vec<_>>(), ["0001_outbox", "0001_ordered"]);
    let pool = file.pool().await;
    for migration in printed.iter().rev() {
        sqlx::raw_sql(AssertSqlSafe(migration.down.as_str())).execute(&pool).await.unwrap();
    }
    let left = "SELECT group_concat(name, ' ') FROM (
                    SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY name)";
    assert_eq!(file.ask::<String>(left).await, "outbox_event_migration outbox_event_ordered");
    file.execute("DROP TABLE outbox_event_migration; DROP TABLE outbox_event_ordered").await;
    // In another mode: the first mode is not stored any more.
    let outbox = file.dispatcher(Mode::MultiNode).await;
    assert!(outbox.store().find("1").await.unwrap().is_none());
}

/// Each task has its own connections, as a process would.
#[tokio::test(flavor = "multi_thread")]
async fn processes_that_open_a_new_file_at_once_create_its_tables_once() {
    let file = File::new();
    let all = futures_util::future::join_all((0..8).map(|_| file.dispatcher(Mode::ORDERED))).await;
    all[0].store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
    assert!(all[7].store().find("1").await.unwrap().is_some());
}

#[tokio::test]
async fn a_schema_from_the_future_is_refused() {
    let file = File::new();
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    database.outbox(TableName::default(), Mode::SingleNode).await.unwrap();
    execute(
        &database,
        "INSERT INTO posthaste_migration SELECT 9999, 'future', installed_on, success, checksum, execution_time
             FROM posthaste_migration WHERE version = 1;
         INSERT INTO outbox_event_migration SELECT 9998, 'future', installed_on, success, checksum, execution_time
             FROM outbox_event_migration WHERE version = 1",
    )
    .await;
    let hub = database.migrate_hub().await.unwrap_err();
    assert!(matches!(hub, posthaste_core::hub_store::OpenError::NewerSchema { found: 9999, .. }), "{hub}");
    let outbox = database.outbox(TableName::default(), Mode::SingleNode).await.err().unwrap();
    assert!(matches!(outbox, outbox::OpenError::NewerSchema { found: 9998, known: 1, .. }), "{outbox}");
}

#[tokio::test]
async fn a_service_starts_on_tables_that_the_printed_migrations_made() {
    let (printed, opened) = (File::new(), File::new());
    let pool = printed.pool().await;
    for migration in migrations(&TableName::default(), Mode::ORDERED) {
        sqlx::raw_sql(AssertSqlSafe(migration.up)).execute(&pool).await.unwrap();
    }
    for file in [&printed, &opened] {
        let outbox = file.dispatcher(Mode::ORDERED).await;
        outbox.store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
        assert!(outbox.store().find("1").await.unwrap().is_some());
    }
    let history = "SELECT group_concat(version || description || hex(checksum)) FROM outbox_event_migration";
    assert_eq!(printed.ask::<String>(history).await, opened.ask::<String>(history).await);
}

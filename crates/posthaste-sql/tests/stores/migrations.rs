use posthaste_sql::TableName;
use posthaste_sql::sqlite::OpenError;

use crate::support::{File, event, execute};

const HUB_DOWN: &str = concat!(
    include_str!("../../migrations/sqlite/hub/0003_registry.down.sql"),
    include_str!("../../migrations/sqlite/hub/0002_dead_letters.down.sql"),
    include_str!("../../migrations/sqlite/hub/0001_log.down.sql"),
    "DELETE FROM posthaste_migration;"
);

#[tokio::test]
async fn the_hub_goes_down_to_nothing_and_up_again() {
    let file = File::new();
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    execute(&database, HUB_DOWN).await;
    let left: Vec<String> = sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")
        .fetch_all(database.readers())
        .await
        .unwrap();
    assert_eq!(left, ["posthaste_migration"]);
    database.migrate_hub().await.unwrap();
    database.migrate_hub().await.unwrap();
}

#[tokio::test]
async fn the_outbox_goes_down_and_up_again() {
    const DOWN: &str = "DROP TABLE outbox_event_owner; DROP TABLE outbox_event; DELETE FROM outbox_event_migration;";
    assert_eq!(
        include_str!("../../migrations/sqlite/outbox/0001_outbox.down.sql").replace("{table}", "outbox_event").trim(),
        "DROP TABLE outbox_event_owner;\nDROP TABLE outbox_event;"
    );
    let file = File::new();
    let (database, outbox) = file.dispatcher().await;
    outbox.ingest(vec![event("1", "t", "{}")]).await.unwrap();
    execute(&database, DOWN).await;
    let (_, outbox) = file.dispatcher().await;
    assert!(outbox.find("1").await.unwrap().is_none());
}

#[tokio::test]
async fn a_schema_from_the_future_is_refused() {
    let file = File::new();
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    database.migrate_outbox(&TableName::default()).await.unwrap();
    execute(
        &database,
        "INSERT INTO posthaste_migration SELECT 9999, 'future', installed_on, success, checksum, execution_time
             FROM posthaste_migration WHERE version = 1;
         INSERT INTO outbox_event_migration SELECT 9998, 'future', installed_on, success, checksum, execution_time
             FROM outbox_event_migration WHERE version = 1",
    )
    .await;
    let hub = database.migrate_hub().await.unwrap_err();
    assert!(matches!(hub, OpenError::NewerSchema { found: 9999, .. }), "{hub}");
    let outbox = database.migrate_outbox(&TableName::default()).await.unwrap_err();
    assert!(matches!(outbox, OpenError::NewerSchema { found: 9998, .. }), "{outbox}");
}

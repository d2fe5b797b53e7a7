use posthaste_sql::TableName;
use posthaste_sql::postgres::{Mode, Outbox, OutboxError, Reader};

use crate::support::{LEASE, Postgres, event};

#[tokio::test]
async fn the_outbox_goes_down_to_nothing_and_up_again() {
    const DOWN: &str = "DROP TABLE outbox_event_owner; DROP TABLE outbox_event; DELETE FROM outbox_event_migration;";
    assert_eq!(
        include_str!("../../migrations/postgres/outbox/0001_outbox.down.sql").replace("{table}", "outbox_event").trim(),
        "DROP TABLE outbox_event_owner;\nDROP TABLE outbox_event;"
    );
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::SingleNode).await;
    postgres.write(&outbox, &[event("1", "t", "{}")]).await;
    postgres.execute(DOWN).await;
    let left =
        "SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'";
    assert_eq!(postgres.ask::<String>(left).await, "outbox_event_migration");
    // In the other mode: nothing remembers the first.
    let outbox = postgres.dispatcher(Mode::MultiNode).await;
    assert!(outbox.find("1").await.unwrap().is_none());
}

#[tokio::test]
async fn processes_that_start_together_make_one_table() {
    let postgres = Postgres::start().await;
    let open = || async { postgres.dispatcher(Mode::MultiNode).await };
    tokio::join!(open(), open(), open());
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM outbox_event_owner").await, 1);
}

#[tokio::test]
async fn the_longest_table_name_is_not_too_long() {
    let postgres = Postgres::start().await;
    let table = TableName::new("t".repeat(48)).unwrap();
    for _ in 0..2 {
        let open = Outbox::open(postgres.pool.clone(), table.clone(), Reader::Channels, Mode::MultiNode, LEASE);
        assert!(open.await.unwrap().pending_types().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_schema_from_the_future_is_refused() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::SingleNode).await;
    postgres
        .execute(
            "INSERT INTO outbox_event_migration
             SELECT 9998, 'future', installed_on, success, checksum, execution_time FROM outbox_event_migration",
        )
        .await;
    let table = TableName::default();
    let refused = Outbox::open(postgres.pool.clone(), table, Reader::Dispatcher, Mode::SingleNode, LEASE).await;
    let error = refused.err().unwrap();
    assert!(matches!(error, OutboxError::NewerSchema { found: 9998, known: 1, .. }), "{error}");
}

use posthaste_core::Source;
use posthaste_core::outbox::{Mode, OpenError, OperatorStore, Reader};
use posthaste_sql::TableName;
use posthaste_sql::postgres::migrations;
use sqlx::AssertSqlSafe;

use crate::support::{Postgres, event, open};

#[tokio::test]
async fn migrations_can_be_reverted_and_applied_again() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::ORDERED).await;
    postgres.write(&outbox, &[&event("1", "t", "{}")]).await;
    let printed = migrations(&TableName::default(), Mode::ORDERED);
    assert_eq!(printed.iter().map(|migration| migration.name).collect::<Vec<_>>(), ["0001_outbox", "0001_ordered"]);
    for migration in printed.iter().rev() {
        sqlx::raw_sql(AssertSqlSafe(migration.down.as_str())).execute(&postgres.pool).await.unwrap();
    }
    let left = "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class
                WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'";
    assert_eq!(postgres.ask::<String>(left).await, "outbox_event_migration outbox_event_ordered");
    postgres.execute("DROP TABLE outbox_event_migration; DROP TABLE outbox_event_ordered").await;
    // Another mode is accepted: the first one has left no trace.
    let outbox = postgres.dispatcher(Mode::MultiNode).await;
    assert!(outbox.store().find("1").await.unwrap().is_none());
}

#[tokio::test]
async fn a_table_that_is_up_to_date_opens_without_the_right_to_create_tables() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::MultiNode).await;
    postgres
        .execute(
            "CREATE ROLE service_without_rights LOGIN;
             REVOKE CREATE ON SCHEMA public FROM PUBLIC;
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO service_without_rights",
        )
        .await;
    let pool = sqlx::PgPool::connect(&postgres.url.replace("postgres@", "service_without_rights@")).await.unwrap();
    let open_table = |table| open(pool.clone(), table, Reader::Dispatcher, Mode::MultiNode);
    let outbox = open_table(TableName::default()).await.unwrap();
    postgres.write(&outbox, &[&event("1", "t", "{}")]).await;
    assert!(outbox.store().find("1").await.unwrap().is_some());
    let error = open_table(TableName::new("other").unwrap()).await.err().unwrap();
    assert!(matches!(error, OpenError::Migration { .. }) && error.to_string().contains("migrations"), "{error}");
}

#[tokio::test]
async fn processes_that_start_together_make_one_table() {
    let postgres = Postgres::start().await;
    let dispatcher = || async { postgres.dispatcher(Mode::MultiNode).await };
    tokio::join!(dispatcher(), dispatcher(), dispatcher());
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM outbox_event_owner").await, 1);
}

#[tokio::test]
async fn the_longest_table_name_is_not_too_long() {
    let postgres = Postgres::start().await;
    let table = TableName::new("t".repeat(48)).unwrap();
    for _ in 0..2 {
        let opened = open(postgres.pool.clone(), table.clone(), Reader::Channels, Mode::MultiNode);
        assert!(opened.await.unwrap().pending_types().await.unwrap().is_empty());
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
    let refused = open(postgres.pool.clone(), table, Reader::Dispatcher, Mode::SingleNode).await;
    let error = refused.err().unwrap();
    assert!(matches!(error, OpenError::NewerSchema { found: 9998, known: 1, .. }), "{error}");
}

#[tokio::test]
async fn a_service_starts_on_tables_that_the_printed_migrations_made() {
    let postgres = Postgres::start().await;
    for migration in migrations(&TableName::default(), Mode::ORDERED) {
        sqlx::raw_sql(AssertSqlSafe(migration.up)).execute(&postgres.pool).await.unwrap();
    }
    postgres
        .execute(
            "CREATE ROLE service_on_printed_tables LOGIN;
             REVOKE CREATE ON SCHEMA public FROM PUBLIC;
             GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_event, outbox_event_owner TO service_on_printed_tables;
             GRANT SELECT ON outbox_event_migration, outbox_event_ordered TO service_on_printed_tables",
        )
        .await;
    let pool = sqlx::PgPool::connect(&postgres.url.replace("postgres@", "service_on_printed_tables@")).await.unwrap();
    let outbox = open(pool, TableName::default(), Reader::Dispatcher, Mode::ORDERED).await.unwrap();
    postgres.write(&outbox, &[&event("1", "t", "{}")]).await;
    assert_eq!(outbox.dispatcher_source().claim(10).await.unwrap().items.len(), 1);
    // The library writes the same history when it runs the migrations itself.
    let printed = postgres.ask::<String>("SELECT encode(checksum, 'hex') FROM outbox_event_migration").await;
    postgres.execute("DROP TABLE outbox_event, outbox_event_owner, outbox_event_migration, outbox_event_ordered").await;
    postgres.dispatcher(Mode::ORDERED).await;
    assert_eq!(postgres.ask::<String>("SELECT encode(checksum, 'hex') FROM outbox_event_migration").await, printed);
}

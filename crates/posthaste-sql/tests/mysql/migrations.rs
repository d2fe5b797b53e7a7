use posthaste_core::Source;
use posthaste_core::outbox::{Mode, OpenError, OperatorStore, Reader};
use posthaste_sql::TableName;
use posthaste_sql::mysql::migrations;
use sqlx::AssertSqlSafe;

use crate::support::{MySql, event, open};

#[tokio::test]
async fn migrations_can_be_reverted_and_applied_again() {
    let mysql = MySql::start().await;
    let outbox = mysql.dispatcher(Mode::ORDERED).await;
    mysql.write(&outbox, &[&event("1", "t", "{}")]).await;
    let printed = migrations(&TableName::default(), Mode::ORDERED);
    assert_eq!(printed.iter().map(|migration| migration.name).collect::<Vec<_>>(), ["0001_outbox", "0001_ordered"]);
    for migration in printed.iter().rev() {
        sqlx::raw_sql(AssertSqlSafe(migration.down.as_str())).execute(&mysql.pool).await.unwrap();
    }
    let left = "SELECT GROUP_CONCAT(table_name ORDER BY table_name SEPARATOR ' ') FROM information_schema.tables
                WHERE table_schema = DATABASE()";
    assert_eq!(mysql.ask::<String>(left).await, "outbox_event_migration outbox_event_ordered");
    mysql.execute("DROP TABLE outbox_event_migration; DROP TABLE outbox_event_ordered").await;
    // Another mode is accepted: the first one has left no trace.
    let outbox = mysql.dispatcher(Mode::MultiNode).await;
    assert!(outbox.store().find("1").await.unwrap().is_none());
}

#[tokio::test]
async fn a_table_that_is_up_to_date_opens_without_the_right_to_create_tables() {
    let mysql = MySql::start().await;
    mysql.dispatcher(Mode::MultiNode).await;
    let (server, database) = mysql.url.rsplit_once('/').unwrap();
    let rights = format!(
        "CREATE USER service_without_rights; GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO service_without_rights"
    );
    sqlx::raw_sql(AssertSqlSafe(rights)).execute(&mysql.pool).await.unwrap();
    let server = server.replace("root@", "service_without_rights@");
    let pool = sqlx::MySqlPool::connect(&format!("{server}/{database}")).await.unwrap();
    let open_table = |table| open(pool.clone(), table, Reader::Dispatcher, Mode::MultiNode);
    let outbox = open_table(TableName::default()).await.unwrap();
    mysql.write(&outbox, &[&event("1", "t", "{}")]).await;
    assert!(outbox.store().find("1").await.unwrap().is_some());
    let error = open_table(TableName::new("other").unwrap()).await.err().unwrap();
    assert!(matches!(error, OpenError::Migration { .. }) && error.to_string().contains("migrations"), "{error}");
}

#[tokio::test]
async fn processes_that_start_together_make_one_table() {
    let mysql = MySql::start().await;
    let dispatcher = || async { mysql.dispatcher(Mode::MultiNode).await };
    tokio::join!(dispatcher(), dispatcher(), dispatcher());
    assert_eq!(mysql.ask::<i64>("SELECT count(*) FROM outbox_event_owner").await, 1);
}

#[tokio::test]
async fn the_longest_table_name_is_not_too_long() {
    let mysql = MySql::start().await;
    let table = TableName::new("t".repeat(48)).unwrap();
    for _ in 0..2 {
        let opened = open(mysql.pool.clone(), table.clone(), Reader::Channels, Mode::MultiNode);
        assert!(opened.await.unwrap().pending_types().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_schema_from_the_future_is_refused() {
    let mysql = MySql::start().await;
    mysql.dispatcher(Mode::SingleNode).await;
    mysql
        .execute(
            "INSERT INTO outbox_event_migration
             SELECT 9998, 'future', installed_on, success, checksum, execution_time FROM outbox_event_migration",
        )
        .await;
    let table = TableName::default();
    let refused = open(mysql.pool.clone(), table, Reader::Dispatcher, Mode::SingleNode).await;
    let error = refused.err().unwrap();
    assert!(matches!(error, OpenError::NewerSchema { found: 9998, known: 1, .. }), "{error}");
}

#[tokio::test]
async fn a_service_starts_on_tables_that_the_printed_migrations_made() {
    let mysql = MySql::start().await;
    for migration in migrations(&TableName::default(), Mode::ORDERED) {
        sqlx::raw_sql(AssertSqlSafe(migration.up)).execute(&mysql.pool).await.unwrap();
    }
    let (server, database) = mysql.url.rsplit_once('/').unwrap();
    let mut rights = "CREATE USER service_on_printed_tables;".to_owned();
    for (right, table) in [
        ("SELECT, INSERT, UPDATE, DELETE", "outbox_event"),
        ("SELECT, INSERT, UPDATE, DELETE", "outbox_event_owner"),
        ("SELECT", "outbox_event_migration"),
        ("SELECT", "outbox_event_ordered"),
    ] {
        rights += &format!("GRANT {right} ON {database}.{table} TO service_on_printed_tables;");
    }
    sqlx::raw_sql(AssertSqlSafe(rights)).execute(&mysql.pool).await.unwrap();
    let server = server.replace("root@", "service_on_printed_tables@");
    let pool = sqlx::MySqlPool::connect(&format!("{server}/{database}")).await.unwrap();
    let outbox = open(pool, TableName::default(), Reader::Dispatcher, Mode::ORDERED).await.unwrap();
    mysql.write(&outbox, &[&event("1", "t", "{}")]).await;
    assert_eq!(outbox.dispatcher_source().claim(10).await.unwrap().items.len(), 1);
    // The library writes the same history when it runs the migrations itself.
    let printed = mysql.ask::<String>("SELECT HEX(checksum) FROM outbox_event_migration").await;
    mysql.execute("DROP TABLE outbox_event, outbox_event_owner, outbox_event_migration, outbox_event_ordered").await;
    mysql.dispatcher(Mode::ORDERED).await;
    assert_eq!(mysql.ask::<String>("SELECT HEX(checksum) FROM outbox_event_migration").await, printed);
}

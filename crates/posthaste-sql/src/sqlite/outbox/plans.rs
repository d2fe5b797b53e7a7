//! How SQLite carries out the statements of the hot path. A plan that scans or sorts is a bug that only shows at size.

use sqlx::{AssertSqlSafe, Row};

use super::nameless::BURY;
use super::settling::{CHANGE, DONE, FENCE};
use super::{fill, rows};
use crate::TableName;
use crate::sqlite::Database;

/// 120,000 rows, a tenth of them pending, of ten types.
async fn filled(folder: &tempfile::TempDir) -> Database {
    let database = Database::open(&format!("sqlite://{}/test.db", folder.path().display())).await.unwrap();
    database.migrate_outbox(&TableName::default()).await.unwrap();
    let fill = database.write("fill", |connection| {
        Box::pin(async move {
            let insert = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 120000)
                 INSERT INTO outbox_event (event_type, payload, status) SELECT 'type' || n % 10, '{}', n / 10 % 10 <> 0 FROM n";
            sqlx::query(insert).execute(&mut *connection).await?;
            sqlx::query("ANALYZE").execute(connection).await.map(|_| ())
        })
    });
    fill.await.unwrap();
    database
}

async fn plan(database: &Database, sql: String) -> String {
    let rows =
        sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"))).fetch_all(database.readers()).await.unwrap();
    rows.iter().map(|row| row.get::<String, _>("detail") + "\n").collect()
}

#[tokio::test]
async fn a_claim_reads_its_index_in_order_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    let table = TableName::default();
    for (of_one_type, index) in
        [(false, "outbox_event_pending (due<?)"), (true, "outbox_event_pending_of_type (event_type=? AND due<?)")]
    {
        let plan = plan(&database, rows::pending(&table, of_one_type)).await;
        assert!(plan.contains(&format!("SEARCH outbox_event USING INDEX {index}")), "{plan}");
        assert!(!plan.contains("ORDER BY"), "sorts: {plan}");
    }
    for of_one_type in [false, true] {
        let plan = plan(&database, rows::next_due(&table, of_one_type)).await;
        assert!(
            plan.contains("USING INDEX outbox_event_pending")
                || plan.contains("USING COVERING INDEX outbox_event_pending"),
            "{plan}"
        );
        assert!(!plan.contains("ORDER BY"), "sorts: {plan}");
    }
    database.close().await;
}

#[tokio::test]
async fn what_cannot_be_named_is_found_by_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    let plan = plan(&database, fill(BURY, &TableName::default())).await;
    assert!(plan.contains("SEARCH outbox_event USING INTEGER PRIMARY KEY"), "{plan}");
    assert!(plan.contains("outbox_event_pending_of_type (event_type=?)"), "{plan}");
    database.close().await;
}

#[tokio::test]
async fn a_settlement_looks_its_rows_up_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    for statement in [FENCE, DONE, CHANGE] {
        let plan = plan(&database, fill(statement, &TableName::default())).await;
        assert!(plan.contains("SEARCH outbox_event USING INTEGER PRIMARY KEY"), "{plan}");
    }
    database.close().await;
}

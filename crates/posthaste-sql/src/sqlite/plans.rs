//! What the tests of plans share.

use sqlx::AssertSqlSafe;

use super::Database;

/// The steps of the plan of a statement on the hub tables.
pub(super) async fn plan_of(statement: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", folder.path().join("plans.db").display());
    let database = Database::open(&url).await.unwrap();
    database.migrate_hub().await.unwrap();
    let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {statement}"));
    let rows: Vec<(i64, i64, i64, String)> = sqlx::query_as(explain).fetch_all(database.readers()).await.unwrap();
    rows.into_iter().map(|(.., detail)| detail).collect()
}

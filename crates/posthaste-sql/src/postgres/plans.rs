//! What the tests of plans share.

use sqlx::{AssertSqlSafe, PgConnection};

/// The plan for these values, and the generic plan.
pub(super) async fn plans(connection: &mut PgConnection, sql: &str, values: &str) -> Vec<String> {
    let mut plans = Vec::new();
    for mode in ["force_custom_plan", "force_generic_plan"] {
        let prepare = format!("SET plan_cache_mode = {mode}; DEALLOCATE ALL; PREPARE statement AS {sql}");
        sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await.unwrap();
        let explain = format!("EXPLAIN (COSTS OFF) EXECUTE statement {values}");
        let lines = sqlx::query_scalar(AssertSqlSafe(explain)).persistent(false).fetch_all(&mut *connection).await;
        let lines: Vec<String> = lines.unwrap();
        plans.push(lines.join("\n"));
    }
    plans
}

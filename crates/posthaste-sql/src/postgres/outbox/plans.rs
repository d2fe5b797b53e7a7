//! How PostgreSQL carries out the statements of the hot path. A plan that scans or sorts is a bug that only shows at
//! size, and one that depends on statistics is a bug that shows one night.

use posthaste_testing::servers;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{fill, rows, settling, source};
use crate::TableName;
use crate::outbox::Mode;
use crate::postgres::migrations;

/// 100,000 rows that are pending, of ten types, 100,000 that are done and 50,000 that are delayed.
const FILL: &str = "INSERT INTO outbox_event (event_type, payload, status, available_at)
     SELECT 'type' || n % 10, '{}', (n % 5 < 2)::integer, clock_timestamp() + CASE WHEN n % 5 = 4 THEN interval '1 hour' ELSE interval '0' END
     FROM generate_series(1, 250000) AS n";

/// What the table of a quiet service holds.
const QUIET: &str = "INSERT INTO outbox_event (event_type, payload, status) SELECT 'type' || n % 10, '{}', 1 FROM generate_series(1, 50000) AS n";

const ANALYZE: &str = "ANALYZE outbox_event";

/// The table under every kind of statistics: none, those of an empty table, those of a quiet time, those of now.
async fn tables() -> Vec<PgConnection> {
    let mut tables = Vec::new();
    for steps in [&[FILL][..], &[ANALYZE, FILL], &[QUIET, ANALYZE, FILL], &[FILL, ANALYZE]] {
        let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
        migrations::outbox(&TableName::default()).run(&mut connection).await.unwrap();
        let settings = "ALTER TABLE outbox_event SET (autovacuum_enabled = off)";
        for step in [settings].iter().chain(steps) {
            sqlx::raw_sql(*step).execute(&mut connection).await.unwrap();
        }
        tables.push(connection);
    }
    tables
}

/// The plans for these values and for any.
async fn plans(connection: &mut PgConnection, sql: &str, values: &str) -> Vec<String> {
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

fn index(of_one_type: bool) -> &'static str {
    match of_one_type {
        true => "Index Scan using outbox_event_pending_of_type on outbox_event",
        false => "Index Scan using outbox_event_pending on outbox_event",
    }
}

fn assert_no_scan(plan: &str) {
    let scans = plan.lines().any(|line| line.ends_with("Seq Scan on outbox_event") || line.contains("Bitmap"));
    assert!(!scans, "{plan}");
}

const BEGINNING: &str = "'0001-01-01', -9223372036854775808";
const MIDDLE: &str = "clock_timestamp() - interval '10 minutes', 100000";

#[tokio::test]
async fn a_claim_reads_its_index_in_order_and_nothing_else() {
    let table = TableName::default();
    for mut connection in tables().await {
        sqlx::raw_sql(rows::SCAN).execute(&mut connection).await.unwrap();
        for of_one_type in [false, true] {
            let of_type = if of_one_type { ", 'type3'" } else { "" };
            for position in [BEGINNING, MIDDLE] {
                let values = format!("('{{1,2,3}}', 500, {position}{of_type})");
                for plan in plans(&mut connection, &rows::pending(&table, of_one_type), &values).await {
                    assert!(plan.contains(index(of_one_type)), "{plan}");
                    assert!(plan.contains("hashed SubPlan") && !plan.contains("Sort"), "{plan}");
                    assert_no_scan(&plan);
                }
                let values = format!("('{{1,2,3}}', 500, {position}, 'lock', 30000000, true{of_type})");
                for plan in plans(&mut connection, &rows::lease(&table, of_one_type), &values).await {
                    let (scan, chosen) = plan.split_once("InitPlan").expect("some of what is due is chosen");
                    let (above, below) = scan.split_once("LockRows").expect("rows are locked");
                    assert!(below.contains(index(of_one_type)) && below.contains("hashed SubPlan"), "{plan}");
                    assert!(!scan.contains("Sort") && above.contains("Limit"), "sorts the backlog: {plan}");
                    assert!(chosen.contains("Index Scan using outbox_event_pkey on outbox_event"), "{plan}");
                    assert_no_scan(&plan);
                }
            }
        }
    }
}

#[tokio::test]
async fn the_next_due_row_and_the_pending_types_are_found_by_their_index() {
    let table = TableName::default();
    for mut connection in tables().await {
        sqlx::raw_sql(rows::SCAN).execute(&mut connection).await.unwrap();
        for (mode, of_one_type) in
            [(Mode::SingleNode, false), (Mode::SingleNode, true), (Mode::MultiNode, false), (Mode::MultiNode, true)]
        {
            let values = format!("('{{1,2,3}}', true{})", if of_one_type { ", 'type3'" } else { "" });
            for plan in plans(&mut connection, &rows::next_due(&table, mode, of_one_type), &values).await {
                let plan = plan.replace("Index Only Scan", "Index Scan");
                assert!(plan.contains(index(of_one_type)) && !plan.contains("Sort"), "{plan}");
                assert_no_scan(&plan);
            }
        }
        for plan in plans(&mut connection, &fill(rows::PENDING_TYPES, &table), "").await {
            assert_eq!(plan.matches("outbox_event_pending_of_type").count(), 2, "{plan}");
            assert!(!plan.contains("Sort") && !plan.contains("Hash"), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

#[tokio::test]
async fn a_settlement_looks_its_rows_up_by_their_numbers() {
    let table = TableName::default();
    for mut connection in tables().await {
        for mode in [Mode::SingleNode, Mode::MultiNode] {
            let done = (settling::done(&table, mode), "('{a,b}', '{5,6}')");
            let change = (settling::change(&table, mode), "('{a,b}', '{5,6}', '{1,2}', '{t,f}', '{1,2}', '{a,b}')");
            let renew = (fill(source::RENEW, &table), "('{a,b}', '{5,6}')");
            let release = (fill(source::RELEASE, &table), "('{a,b}', '{5,6}')");
            for (sql, values) in [done, change, renew, release] {
                for plan in plans(&mut connection, &sql, values).await {
                    let by_number = plan.contains("Index Scan using outbox_event_pkey on outbox_event")
                        || plan.contains("Bitmap Index Scan on outbox_event_pkey");
                    let scans = plan
                        .lines()
                        .any(|line| line.contains("Seq Scan on outbox_event ") || line.contains("_pending"));
                    assert!(by_number && !scans, "{plan}");
                }
            }
        }
    }
}

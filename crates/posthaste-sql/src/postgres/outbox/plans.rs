//! How PostgreSQL executes the statements that run all the time. A plan that scans or sorts is a bug that only shows at
//! size, and one that depends on statistics is a bug that shows one night.

use posthaste_backend_tests::servers;
use posthaste_core::outbox::{DeadHead, Mode, Purge, TableName};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::settle::Locked;
use super::{claim, fill, lease, operator, settle};
use crate::postgres::{migrations, plans};

/// Of five rows, two are done, one is delayed and two are pending; of ten types and a thousand aggregates.
fn backlog(rows: u32) -> String {
    format!(
        "INSERT INTO outbox_event (event_type, payload, aggregate_type, aggregate_id, status, available_at)
         SELECT 'type' || n % 10, '{{}}', 'a', CASE WHEN n % 3 > 0 THEN n % 1000 END, (n % 5 < 2)::integer,
             clock_timestamp() + CASE WHEN n % 5 = 4 THEN interval '1 hour' ELSE interval '0' END
         FROM generate_series(1, {rows}) AS n"
    )
}

/// The rows of a quiet service: all of them are done.
const QUIET: &str = "INSERT INTO outbox_event (event_type, payload, status) SELECT 'type' || n % 10, '{}', 1 FROM generate_series(1, 50000) AS n";

const ANALYZE: &str = "ANALYZE outbox_event";

/// A table on which these steps ran. Autovacuum is off, so that its statistics do not change.
async fn table(steps: &[&str]) -> PgConnection {
    let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
    migrations::DIALECT.outbox(&TableName::default()).run(&mut connection).await.unwrap();
    migrations::DIALECT.ordered(&TableName::default()).run(&mut connection).await.unwrap();
    let settings = "ALTER TABLE outbox_event SET (autovacuum_enabled = off)";
    for step in [settings].iter().chain(steps) {
        sqlx::raw_sql(AssertSqlSafe(*step)).execute(&mut connection).await.unwrap();
    }
    connection
}

async fn check(mut connection: PgConnection) {
    sqlx::raw_sql(claim::SCAN).execute(&mut connection).await.unwrap();
    a_claim_reads_its_index_in_order_and_nothing_else(&mut connection).await;
    an_ordered_claim_looks_each_key_up(&mut connection).await;
    the_next_due_row_and_the_pending_types_are_found_by_their_index(&mut connection).await;
    a_purge_reads_what_it_deletes(&mut connection).await;
    a_lost_claim_is_searched_for_at_the_head_of_its_index(&mut connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut connection).await.unwrap();
    sqlx::raw_sql(settle::CHANGE).execute(&mut connection).await.unwrap();
    a_settlement_looks_its_rows_up_by_their_numbers(&mut connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut connection).await.unwrap();
    operator_queries_use_an_index(&mut connection).await;
}

#[tokio::test]
async fn plans_hold_without_statistics() {
    check(table(&[&backlog(250_000)]).await).await;
}

/// A plan that was made when the table was small is kept when it is large.
#[tokio::test]
async fn plans_are_the_same_while_the_table_is_empty() {
    check(table(&[]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_an_empty_table() {
    check(table(&[ANALYZE, &backlog(250_000)]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_a_quiet_time() {
    check(table(&[QUIET, ANALYZE, &backlog(250_000)]).await).await;
}

/// A million rows that are not done.
#[tokio::test]
async fn plans_hold_with_the_statistics_of_now_and_a_million_rows() {
    check(table(&[&backlog(1_700_000), ANALYZE]).await).await;
}

/// The plan of a statement in this mode for these values, and the generic plan.
async fn plans(connection: &mut PgConnection, mode: Mode, sql: &str, values: &str) -> Vec<String> {
    plans::plans(connection, &fill(sql, &TableName::default(), mode), values).await
}

fn index(of_one_type: bool) -> &'static str {
    match of_one_type {
        true => "Index Scan using outbox_event_pending_of_type on outbox_event",
        false => "Index Scan using outbox_event_pending on outbox_event",
    }
}

fn assert_no_scan(plan: &str) {
    let scans = plan.lines().any(|line| line.contains("Seq Scan on outbox_event") || line.contains("Bitmap"));
    assert!(!scans, "{plan}");
}

const BEGINNING: &str = "'0001-01-01', -9223372036854775808";
const MIDDLE: &str = "clock_timestamp() - interval '10 minutes', 100000";
const BLOCK: Mode = Mode::Ordered(DeadHead::Block);
const SKIP: Mode = Mode::Ordered(DeadHead::Skip);

async fn a_claim_reads_its_index_in_order_and_nothing_else(connection: &mut PgConnection) {
    for of_one_type in [false, true] {
        let of_type = if of_one_type { ", 'type3'" } else { "" };
        for position in [BEGINNING, MIDDLE] {
            let values = format!("('{{1,2,3}}', 500, {position}, 0{of_type})");
            for plan in plans(connection, Mode::SingleNode, &claim::pending(of_one_type), &values).await {
                assert!(plan.contains(index(of_one_type)), "{plan}");
                assert!(plan.contains("hashed SubPlan") && !plan.contains("Sort"), "{plan}");
                assert_no_scan(&plan);
            }
            let values = format!("('{{1,2,3}}', 500, {position}, 0, 30000000, true, 'claim'{of_type})");
            for plan in plans(connection, Mode::MultiNode, &claim::lease_due(of_one_type), &values).await {
                let (scan, selection) = plan.split_once("InitPlan").expect("the claim selects among due rows");
                let (above, below) = scan.split_once("LockRows").expect("rows are locked");
                assert!(below.contains(index(of_one_type)) && below.contains("hashed SubPlan"), "{plan}");
                assert!(!scan.contains("Sort") && above.contains("Limit"), "sorts the backlog: {plan}");
                assert!(selection.contains("Index Scan using outbox_event_pkey on outbox_event"), "{plan}");
                assert_no_scan(&plan);
            }
            let values = format!("('{{1,2,3}}', 500, {position}, 0, 30000000, true{of_type})");
            let candidates = claim::candidates(Mode::MultiNode, of_one_type);
            for plan in plans(connection, Mode::MultiNode, &candidates, &values).await {
                assert!(plan.contains(index(of_one_type)) && !plan.contains("Sort"), "{plan}");
                assert_no_scan(&plan);
            }
        }
    }
}

async fn an_ordered_claim_looks_each_key_up(connection: &mut PgConnection) {
    for mode in [BLOCK, SKIP] {
        for position in [BEGINNING, MIDDLE] {
            let values = format!("('{{1,2,3}}', 500, {position}, 0, 30000000, true)");
            for plan in plans(connection, mode, &claim::candidates(mode, false), &values).await {
                assert!(plan.contains("Index Scan using outbox_event_ready on outbox_event"), "{plan}");
                assert!(plan.contains("Scan Backward using outbox_event_key on outbox_event before"), "{plan}");
                assert!(!plan.contains("Sort"), "{plan}");
                assert_no_scan(&plan);
            }
        }
        for plan in plans(connection, mode, &claim::lease_rows(), "('{5,6}', 'claim', 1)").await {
            assert!(plan.contains("Index Scan using outbox_event_pkey on outbox_event"), "{plan}");
        }
        for plan in plans(connection, mode, claim::BLOCK, "('{5,6}')").await {
            assert!(plan.contains("using outbox_event_pkey on outbox_event"), "{plan}");
            assert_no_scan(&plan);
        }
        for locked in [Locked::Wait, Locked::Skip] {
            for plan in plans(connection, mode, &claim::unblock(locked), "('{a,a}', '{1,2}', 100)").await {
                assert!(plan.contains("using outbox_event_key on outbox_event"), "{plan}");
                assert!(plan.contains("using outbox_event_pkey on outbox_event"), "{plan}");
                assert_no_scan(&plan);
            }
        }
        for plan in plans(connection, mode, claim::BLOCKED_ROWS, "(0, 1000)").await {
            assert!(plan.contains("using outbox_event_blocked on outbox_event"), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

async fn the_next_due_row_and_the_pending_types_are_found_by_their_index(connection: &mut PgConnection) {
    for (mode, of_one_type) in [
        (Mode::SingleNode, false),
        (Mode::SingleNode, true),
        (Mode::MultiNode, false),
        (Mode::MultiNode, true),
        (BLOCK, false),
    ] {
        let of_type = if of_one_type { ", 'type3'" } else { "" };
        let lease = if mode.leases_rows() { ", 30000000" } else { "" };
        let values = format!("('{{1,2,3}}', true{of_type}{lease})");
        for plan in plans(connection, mode, &claim::next_due(mode, of_one_type), &values).await {
            let plan = plan.replace("Index Only Scan", "Index Scan");
            let ready = mode == BLOCK && plan.contains("Index Scan using outbox_event_ready on outbox_event");
            assert!((ready || plan.contains(index(of_one_type))) && !plan.contains("Sort"), "{plan}");
            assert_no_scan(&plan);
        }
    }
    for plan in plans(connection, Mode::SingleNode, operator::OLDEST_DUE, "").await {
        assert!(plan.contains("Scan using outbox_event_pending on outbox_event") && !plan.contains("Sort"), "{plan}");
        assert_no_scan(&plan);
    }
    for plan in plans(connection, BLOCK, operator::OLDEST_UNBLOCKED, "").await {
        assert!(plan.contains("Scan using outbox_event_ready on outbox_event") && !plan.contains("Sort"), "{plan}");
        assert_no_scan(&plan);
    }
    for plan in plans(connection, Mode::SingleNode, operator::COUNT_PENDING, "(10000)").await {
        assert!(plan.contains("Scan using outbox_event_pending on outbox_event") && !plan.contains("Sort"), "{plan}");
        assert_no_scan(&plan);
    }
    for plan in plans(connection, Mode::SingleNode, claim::PENDING_TYPES, "").await {
        assert_eq!(plan.matches("outbox_event_pending_of_type").count(), 2, "{plan}");
        assert!(!plan.contains("Sort") && !plan.contains("Hash"), "{plan}");
        assert_no_scan(&plan);
    }
}

async fn a_settlement_looks_its_rows_up_by_their_numbers(connection: &mut PgConnection) {
    let modes = [Mode::SingleNode, Mode::MultiNode, BLOCK];
    for (mode, locked) in modes.into_iter().flat_map(|mode| [(mode, Locked::Wait), (mode, Locked::Skip)]) {
        let done = (settle::mark_done(mode, locked), "('{a,b}', '{5,6}')");
        let change = (settle::update(mode, locked), "('{a,b}', '{5,6}', '{1,2}', '{1,NULL}', '{1,2}', '{a,b}')");
        let renew = (lease::renew(mode, locked), "('{a,b}', '{5,6}')");
        let release = (lease::release(mode, locked), "('{a,b}', '{5,6}')");
        let still_claimed = (settle::still_claimed(mode), "('{a,b}', '{5,6}')");
        for (sql, values) in [done, change, renew, release, still_claimed] {
            for plan in plans(connection, mode, &sql, values).await {
                let by_number = plan.contains("Index Scan using outbox_event_pkey on outbox_event")
                    || plan.contains("Bitmap Index Scan on outbox_event_pkey");
                let scans = plan.lines().any(|line| {
                    line.contains("Seq Scan on outbox_event ") || line.contains("_pending") || line.contains("_ready")
                });
                assert!(by_number && !scans, "{plan}");
            }
        }
    }
}

async fn a_lost_claim_is_searched_for_at_the_head_of_its_index(connection: &mut PgConnection) {
    for (mode, index) in [(Mode::MultiNode, "outbox_event_pending"), (BLOCK, "outbox_event_ready")] {
        for plan in plans(connection, mode, &lease::release_claims(mode), "('{a,b}')").await {
            assert!(plan.contains(&format!("Index Scan using {index} on outbox_event")), "{plan}");
            assert!(plan.contains("Limit") && !plan.contains("Sort"), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

async fn operator_queries_use_an_index(connection: &mut PgConnection) {
    for plan in plans(connection, Mode::SingleNode, &operator::dead(), "(NULL, 'type3', NULL, 100)").await {
        assert!(plan.contains("outbox_event_dead") && !plan.contains("Seq Scan"), "{plan}");
    }
}

async fn a_purge_reads_what_it_deletes(connection: &mut PgConnection) {
    for purge in [Purge::Done, Purge::Dead, Purge::Everything] {
        for plan in plans(connection, Mode::SingleNode, &operator::purge(purge), "(1000000, 500)").await {
            let index = if purge == Purge::Dead { "outbox_event_dead" } else { "outbox_event_pkey" };
            assert!(plan.contains(&format!("Index Scan using {index}")) && !plan.contains("Sort"), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

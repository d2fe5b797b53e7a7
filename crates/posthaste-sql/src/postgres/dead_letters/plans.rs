//! How PostgreSQL executes the statements on dead letters that run all the time, and the lists of operators.

use chrono::DateTime;
use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{
    DeadLetterCursor, DeadLetterFilter, DeadLetterSort, DeadLetterSortKey, DeadLetterStatus,
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{claim, lease, queries, replay, retention, settle};
use crate::postgres::log::{READ, WRITE};
use crate::postgres::migrations;
use crate::postgres::outbox::claim::SCAN;
use crate::postgres::plans::plans;

/// Dead letters of a hundred subscriptions. Of ten, six are FAILED without a retry, two are due, one is due later and one
/// is PROCESSED.
fn filled(letters: u32) -> String {
    format!(
        "INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
             error, error_code, first_failed_at, status, scheduled_at, created_at)
         SELECT 'id ' || n, n, 'event ' || n, 's' || n % 100, 'b' || n % 50, 't', 'd', 'e', 'error', 'code', now(),
             CASE WHEN n / 100 % 10 < 6 THEN 2 WHEN n / 100 % 10 = 9 THEN 1 ELSE 0 END,
             CASE n / 100 % 10 WHEN 6 THEN now() WHEN 7 THEN now() WHEN 8 THEN now() + interval '1 hour' END,
             date_trunc('milliseconds', now()) + n * interval '1 millisecond'
         FROM generate_series(0, {letters} - 1) AS n;
         INSERT INTO dlt_payload (letter_id, envelope, readable) SELECT id, 'envelope', '{{}}' FROM dlt_event;
         INSERT INTO retry_history (letter_id, trigger, replay_id, duration_ms)
             SELECT id, 'REPLAY', 'r' || delivery_id::bigint % 1000, 1 FROM dlt_event"
    )
}

const ANALYZE: &str = "ANALYZE dlt_event, dlt_payload, retry_history";

/// Tables on which these steps ran. Autovacuum is off, so that the statistics do not change.
async fn tables(steps: &[&str]) -> PgConnection {
    let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
    migrations::DIALECT.hub().run(&mut connection).await.unwrap();
    let settings = "ALTER TABLE dlt_event SET (autovacuum_enabled = off);
        ALTER TABLE dlt_payload SET (autovacuum_enabled = off); ALTER TABLE retry_history SET (autovacuum_enabled = off)";
    for step in [settings].iter().chain(steps) {
        sqlx::raw_sql(AssertSqlSafe(*step)).execute(&mut connection).await.unwrap();
    }
    connection
}

async fn check(mut connection: PgConnection) {
    let connection = &mut connection;
    sqlx::raw_sql(SCAN).execute(&mut *connection).await.unwrap();
    a_claim_reads_the_due_dead_letters_of_each_subscription_in_order(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    sqlx::raw_sql(WRITE).execute(&mut *connection).await.unwrap();
    dead_letters_are_changed_by_their_ids(connection).await;
    the_leases_of_an_owner_are_searched_for_among_those_that_are_due(connection).await;
    retention_reads_the_oldest_processed_dead_letters(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    sqlx::raw_sql(READ).execute(&mut *connection).await.unwrap();
    a_look_is_a_seek_per_subscription_and_sorts_nothing(connection).await;
    lists_read_an_index_in_its_order(connection).await;
    other_queries_look_up_dead_letters(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(connection).await.unwrap();
}

#[track_caller]
fn assert_no_scan(plan: &str) {
    assert!(!plan.contains("Seq Scan on dlt_") && !plan.contains("Seq Scan on retry_history"), "{plan}");
    assert!(!plan.contains("Bitmap"), "{plan}");
}

async fn a_look_is_a_seek_per_subscription_and_sorts_nothing(connection: &mut PgConnection) {
    for plan in plans(connection, &claim::waiting(), "('{id 1,id 2}')").await {
        assert_eq!(plan.matches("using dlt_event_waiting").count(), 3, "{plan}");
        assert!(plan.contains("hashed SubPlan") && !plan.contains("Sort"), "{plan}");
        assert_no_scan(&plan);
    }
}

async fn a_claim_reads_the_due_dead_letters_of_each_subscription_in_order(connection: &mut PgConnection) {
    let values = "('{id 1,id 2}', 'claim', 30000000, '{s1,s2}', '{5,6}')";
    for plan in plans(connection, &claim::lease_due(), values).await {
        let (_, chosen) = plan.split_once("Function Scan on").expect("one scan for each subscription");
        let (above, below) = chosen.split_once("LockRows").expect("dead letters are locked");
        assert!(above.contains("Limit") && below.contains("using dlt_event_waiting"), "{plan}");
        assert!(below.contains("hashed SubPlan") && !plan.contains("Sort"), "{plan}");
        assert!(plan.contains("using dlt_event_pkey") && plan.contains("using dlt_payload_pkey"), "{plan}");
        assert_no_scan(&plan);
    }
}

async fn dead_letters_are_changed_by_their_ids(connection: &mut PgConnection) {
    let settlement = "('{id 1,id 2}', '{SCHEDULED,REPLAY}', '{1,2}', '{1,0}', '{1,1}', '{t,f}', '{keep,move}', '{0,1}',
        '{keep,move}', '{0,1}', '{a,b}', '{a,b}', '{a,b}', '{1,2}')";
    for (sql, values) in [
        (lease::lock_claimed(), "('{id 1,id 2}', '{a,b}')"),
        (lease::CLAIMED.to_owned(), "('{id 1,id 2}', '{a,b}')"),
        (lease::renew_leases(), "('{id 1,id 2}', '{a,b}', 1)"),
        (lease::release_leases(), "('{id 1,id 2}', '{a,b}')"),
        (replay::replay(), "('r', '{id 1,id 2}', 'reason')"),
        (settle::update(), settlement),
    ] {
        for plan in plans(connection, &sql, values).await {
            assert!(plan.contains("using dlt_event_pkey") && plan.contains("Index Cond: (id = "), "{plan}");
            assert!(!plan.contains("Merge Join"), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

async fn the_leases_of_an_owner_are_searched_for_among_those_that_are_due(connection: &mut PgConnection) {
    for plan in plans(connection, &lease::release_leases_of_owner(), "('owner')").await {
        assert!(plan.contains("using dlt_event_due"), "{plan}");
        assert_no_scan(&plan);
    }
}

async fn retention_reads_the_oldest_processed_dead_letters(connection: &mut PgConnection) {
    for plan in plans(connection, &retention::remove(), "(1000000, 200)").await {
        assert!(plan.contains("Index Scan using dlt_event_status_updated") && !plan.contains("Sort"), "{plan}");
        assert!(plan.contains("using dlt_event_pkey"), "{plan}");
        assert_no_scan(&plan);
    }
}

async fn lists_read_an_index_in_its_order(connection: &mut PgConnection) {
    let all = DeadLetterFilter::default;
    let failed = || Some(DeadLetterStatus::Failed);
    let text = |text: &str| Some(text.to_owned());
    let by_update = DeadLetterSort { by: DeadLetterSortKey::UpdatedAt, descending: true };
    // The values of the conditions, and those of the columns that the index begins with.
    for (filter, index, conditions, first) in [
        (all(), "created", "", ""),
        (DeadLetterFilter { from: DateTime::from_timestamp(0, 0), ..all() }, "created", "'1970-01-01', ", ""),
        (DeadLetterFilter { status: failed(), ..all() }, "status_created", "", "2, "),
        (DeadLetterFilter { status: failed(), sort: by_update, ..all() }, "status_updated", "", "2, "),
        (DeadLetterFilter { subscriber_id: text("b1"), status: failed(), ..all() }, "subscriber", "", "'b1', 2, "),
        (DeadLetterFilter { message_id: text("event 1"), ..all() }, "event", "", "'event 1', "),
    ] {
        let cursor = DeadLetterCursor { sort: filter.sort, key: 0, id: "id".to_owned() };
        let next = DeadLetterFilter { cursor: Some(cursor), ..filter.clone() };
        let first_page = format!("({conditions}{first}{first}51, 0)");
        let next_page = format!("({conditions}{first}{first}{first}'2030-01-01', 'id', 51)");
        for (filter, values) in [(&filter, first_page), (&next, next_page)] {
            let sql = queries::page(filter).sql().as_str().to_owned();
            for plan in plans(connection, &sql, &values).await {
                let scan = format!("Index Scan Backward using dlt_event_{index} on dlt_event");
                assert!(plan.contains(&scan) && !plan.contains("Sort"), "{filter:?}: {plan}");
                assert_no_scan(&plan);
            }
        }
    }
}

async fn other_queries_look_up_dead_letters(connection: &mut PgConnection) {
    for (sql, values, index) in [
        (queries::of_event(), "('event 1')", "dlt_event_event"),
        (queries::is_due(), "", "dlt_event_due"),
        (queries::oldest_due(), "", "dlt_event_due"),
        (replay::RESULTS.to_owned(), "('r1')", "dlt_event_replay"),
    ] {
        for plan in plans(connection, &sql, values).await {
            assert!(plan.contains(&format!("using {index}")), "{plan}");
            assert_no_scan(&plan);
        }
    }
}

#[tokio::test]
async fn plans_hold_without_statistics() {
    check(tables(&[&filled(100_000)]).await).await;
}

/// A plan that was made when the tables were small is kept when they are large.
#[tokio::test]
async fn plans_are_the_same_while_the_tables_are_empty() {
    check(tables(&[]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_empty_tables() {
    check(tables(&[ANALYZE, &filled(100_000)]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_now() {
    check(tables(&[&filled(100_000), ANALYZE]).await).await;
}

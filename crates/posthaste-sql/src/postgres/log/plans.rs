//! How PostgreSQL executes the statements of the log that run all the time, and those that must not read all records.

use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{QuarantineCursor, QuarantineFilter, QuarantineStatus};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::quarantine::{self, list, operator};
use super::{READ, WRITE, inspect, leases, read, retention};
use crate::postgres::migrations;
use crate::postgres::plans::plans;

/// Partitions of a hundred topics, each read by ten groups, and this many records in all.
fn filled(records: u32) -> String {
    format!(
        "INSERT INTO log_partition (topic, partition) SELECT 't' || n / 10, n % 10 FROM generate_series(0, 999) AS n;
         INSERT INTO log_record (partition_id, \"offset\", key, value)
             SELECT 1 + n % 1000, n / 1000, 'key ' || n, 'value' FROM generate_series(0, {records} - 1) AS n;
         UPDATE log_partition SET next_offset = {records} / 1000;
         INSERT INTO log_group (group_name, partition_id, watermark)
             SELECT 'group ' || n % 10, 1 + n / 10, 5 FROM generate_series(0, 9999) AS n;
         INSERT INTO quarantined_record (id, group_name, topic, partition, \"offset\", key, value, reason, replayable, status)
             SELECT 'id ' || n, 'group ' || n % 3, 't' || n % 100, 0, n, 'key', 'value', 'reason', true, n / 10 % 10 % 3
             FROM generate_series(0, {records} / 10) AS n"
    )
}

const ANALYZE: &str = "ANALYZE log_partition, log_record, log_group, quarantined_record";

/// Tables on which these steps ran. Autovacuum is off, so that the statistics do not change.
async fn tables(steps: &[&str]) -> PgConnection {
    let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
    migrations::DIALECT.hub().run(&mut connection).await.unwrap();
    let settings = "ALTER TABLE log_partition SET (autovacuum_enabled = off);
        ALTER TABLE log_record SET (autovacuum_enabled = off); ALTER TABLE log_group SET (autovacuum_enabled = off);
        ALTER TABLE quarantined_record SET (autovacuum_enabled = off)";
    for step in [settings].iter().chain(steps) {
        sqlx::raw_sql(AssertSqlSafe(*step)).execute(&mut connection).await.unwrap();
    }
    connection
}

async fn check(mut connection: PgConnection) {
    let connection = &mut connection;
    an_ack_looks_up_each_partition(connection).await;
    sqlx::raw_sql(WRITE).execute(&mut *connection).await.unwrap();
    quarantined_records_are_changed_by_their_ids(connection).await;
    retention_looks_up_the_first_records_of_each_partition(connection).await;
    retention_reads_the_oldest_quarantined_records_of_a_status(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    sqlx::raw_sql(READ).execute(&mut *connection).await.unwrap();
    a_fetch_is_a_range_scan_per_partition_and_sorts_no_partition(connection).await;
    operator_queries_look_up_records(connection).await;
    lists_of_the_quarantine_read_an_index_in_its_order(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(connection).await.unwrap();
}

async fn a_fetch_is_a_range_scan_per_partition_and_sorts_no_partition(connection: &mut PgConnection) {
    for plan in plans(connection, read::READ_RECORDS, "('{1,2,3}', '{5,6,7}', 500, 100, 1000000)").await {
        let (outer, inner) = plan.split_once("Function Scan on place").expect("one scan for each place");
        assert!(inner.contains("Index Scan using log_record_pkey on log_record") && !inner.contains("Sort"), "{plan}");
        // Incremental: it sorts the records of one partition after the other, and stops at the limit.
        let sorts = outer.matches("Sort  ").count() + outer.matches("Sort\n").count();
        assert!(sorts <= 1 && outer.contains("Incremental Sort") && outer.contains("Limit"), "{plan}");
        assert!(!plan.contains("Seq Scan") && !plan.contains("Bitmap"), "{plan}");
    }
}

async fn an_ack_looks_up_each_partition(connection: &mut PgConnection) {
    let values = "('{1,2}', '{3,4}', '{5,6}', '{a,b}', 'group 1', 'owner')";
    for plan in plans(connection, leases::RECORD, values).await {
        // By its key, or by the partition, which has one row for each group.
        let lookups = plan.matches("Index Scan").count();
        assert_eq!(lookups, 2, "{plan}");
        assert!(!plan.contains("Seq Scan"), "{plan}");
    }
}

async fn retention_looks_up_the_first_records_of_each_partition(connection: &mut PgConnection) {
    for plan in plans(connection, &retention::remove(), "(0, 1000)").await {
        assert!(
            plan.contains("using log_record_pkey on log_record") && !plan.contains("Seq Scan on log_record"),
            "{plan}"
        );
    }
}

async fn retention_reads_the_oldest_quarantined_records_of_a_status(connection: &mut PgConnection) {
    for plan in plans(connection, &quarantine::retention::remove(), "(0, 1000000, 200)").await {
        assert!(plan.contains("Index Scan using quarantined_record_list on") && !plan.contains("Sort"), "{plan}");
        assert!(plan.contains("using quarantined_record_pkey") && !plan.contains("Seq Scan"), "{plan}");
    }
}

async fn operator_queries_look_up_records(connection: &mut PgConnection) {
    for sql in [&inspect::lags(), inspect::BACKLOGS, inspect::TOPICS] {
        for plan in plans(connection, sql, "").await {
            assert!(plan.contains("using log_record_pkey on log_record"), "{plan}");
            assert!(!plan.contains("Seq Scan on log_record"), "{plan}");
        }
    }
    for plan in plans(connection, inspect::RECORDS_OF_KEY, "('key 7', 200)").await {
        assert!(plan.contains("Index Scan using log_record_key on log_record"), "{plan}");
        assert!(!plan.contains("Seq Scan on log_record") && !plan.contains("Bitmap"), "{plan}");
    }
}

async fn lists_of_the_quarantine_read_an_index_in_its_order(connection: &mut PgConnection) {
    let all = QuarantineFilter::default;
    let after = QuarantineCursor { created_at: chrono::Utc::now(), id: String::new() };
    let group = || Some("group 1".to_owned());
    let topic = || Some("t1".to_owned());
    for (filter, index, values) in [
        (all(), "list", "0"),
        (QuarantineFilter { from: Some(chrono::Utc::now()), ..all() }, "list", "0, '2020-01-01'"),
        (QuarantineFilter { group: group(), ..all() }, "list_of_group", "0, 'group 1'"),
        (QuarantineFilter { topic: topic(), ..all() }, "list_of_topic", "0, 't1'"),
        (QuarantineFilter { topic: topic(), group: group(), ..all() }, "list_of_", "0, 'group 1', 't1'"),
    ] {
        let status = QuarantineStatus::Quarantined;
        for (after, values) in [(None, values.to_owned()), (Some(&after), format!("{values}, '2020-01-01', 'id'"))] {
            let sql = list::page(status, &filter, after, 50).sql().as_str().to_owned();
            for plan in plans(connection, &sql, &format!("({values}, 51)")).await {
                let scan = format!("Index Scan Backward using quarantined_record_{index}");
                assert!(plan.contains(&scan) && !plan.contains("Sort"), "{filter:?}: {plan}");
            }
        }
        let sql = list::count(status, &filter).sql().as_str().to_owned();
        for plan in plans(connection, &sql, &format!("({values}, 10001)")).await {
            assert!(plan.contains("Index") && !plan.contains("Seq Scan"), "{filter:?}: {plan}");
        }
    }
}

async fn quarantined_records_are_changed_by_their_ids(connection: &mut PgConnection) {
    for (sql, values) in [
        (operator::claim(), "('{id 1,id 2}', 'claim', 1)"),
        (operator::mark_replayed(), "('{id 1,id 2}', 'claim')"),
        (operator::release(), "('{id 1,id 2}', 'claim', 'why')"),
        (operator::discard(), "('{id 1,id 2}', 'why')"),
    ] {
        for plan in plans(connection, &sql, values).await {
            assert!(plan.contains("using quarantined_record_pkey") && !plan.contains("Seq Scan"), "{plan}");
        }
    }
}

#[tokio::test]
async fn plans_hold_without_statistics() {
    check(tables(&[&filled(200_000)]).await).await;
}

/// A plan that was made when the tables were small is kept when they are large.
#[tokio::test]
async fn plans_are_the_same_while_the_tables_are_empty() {
    check(tables(&[]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_empty_tables() {
    check(tables(&[ANALYZE, &filled(200_000)]).await).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_now() {
    check(tables(&[&filled(200_000), ANALYZE]).await).await;
}

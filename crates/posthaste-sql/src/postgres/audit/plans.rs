//! How PostgreSQL executes the statements on the audit log.

use chrono::Utc;
use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{AuditCursor, AuditFilter, AuditPageRequest, LogType};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{list, retention};
use crate::postgres::log::{READ, WRITE};
use crate::postgres::migrations;
use crate::postgres::plans::plans;

/// Entries of a thousand events and ten subscriptions, of all types.
const FILL: &str = "INSERT INTO audit_log (id, at, log_type, event_id, subscription_id, status_code)
     SELECT gen_random_uuid(), now() + n * interval '1 millisecond', n % 20, 'e' || n % 1000,
         CASE WHEN n % 20 BETWEEN 4 AND 12 THEN 's' || n % 10 END, CASE n % 20 WHEN 6 THEN 200 WHEN 7 THEN 503 END
     FROM generate_series(1, 20000) AS n";

async fn tables(steps: &[&'static str]) -> PgConnection {
    let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
    migrations::DIALECT.hub().run(&mut connection).await.unwrap();
    for step in ["ALTER TABLE audit_log SET (autovacuum_enabled = off)"].iter().chain(steps) {
        sqlx::raw_sql(AssertSqlSafe(*step)).execute(&mut connection).await.unwrap();
    }
    connection
}

async fn check(mut connection: PgConnection) {
    let connection = &mut connection;
    sqlx::raw_sql(READ).execute(&mut *connection).await.unwrap();
    lists_read_an_index_in_its_order(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    sqlx::raw_sql(WRITE).execute(&mut *connection).await.unwrap();
    for plan in plans(connection, &retention::remove(), "(1000000, 200)").await {
        assert!(plan.contains("using audit_log_at") && plan.contains("using audit_log_pkey"), "{plan}");
        assert!(!plan.contains("Seq Scan on audit_log") && !plan.contains("Sort"), "{plan}");
    }
    sqlx::raw_sql("ROLLBACK").execute(connection).await.unwrap();
}

async fn lists_read_an_index_in_its_order(connection: &mut PgConnection) {
    let (text, all) = (|text: &str| Some(text.to_owned()), AuditFilter::default);
    let cursor = AuditCursor { at: Utc::now(), id: "0190d0c0-1111-7abc-8def-0123456789ab".to_owned() };
    let after = format!("'{}', '{}', ", cursor.at.to_rfc3339(), cursor.id);
    // The index of a part, the values of the columns that it begins with, and those of the other conditions.
    for (filter, index, first, rest) in [
        (all(), "audit_log_at", "", ""),
        (AuditFilter { event_id: text("e1"), ..all() }, "audit_log_event", "'e1', ", ""),
        (
            AuditFilter { subscription_id: text("s7"), log_types: vec![LogType::Executed], ..all() },
            "audit_log_subscription",
            "'s7', 6, ",
            "",
        ),
        (AuditFilter { log_types: vec![LogType::TopicReset], ..all() }, "audit_log_type", "19, ", ""),
        (
            AuditFilter { log_types: vec![LogType::DeliveryFailed], status_code: Some(404), ..all() },
            "audit_log_status",
            "404, 7, ",
            "",
        ),
        (
            AuditFilter { log_types: vec![LogType::Executed], status_code: Some(200), ..all() },
            "audit_log_type",
            "6, ",
            "200, ",
        ),
    ] {
        let parts = filter.parts();
        for cursor in [None, Some(cursor.clone())] {
            let values = match &cursor {
                None => format!("({first}{first}{rest}51, 51, 0)"),
                Some(_) => format!("({first}{first}{rest}{first}{after}51, 51, 0)"),
            };
            let request = AuditPageRequest { cursor, ..AuditPageRequest::default() };
            for plan in plans(connection, list::page_of(&parts, &filter, &request).sql().as_str(), &values).await {
                assert!(plan.contains(&format!("Index Scan Backward using {index}")), "{filter:?}: {plan}");
                assert!(!plan.contains("Seq Scan") && !plan.contains("Bitmap"), "{filter:?}: {plan}");
            }
        }
        let values = format!("({first}{first}{rest}10001)");
        for plan in plans(connection, list::count(parts[0], &filter).sql().as_str(), &values).await {
            assert!(index == "audit_log_at" || plan.contains(&format!("using {index}")), "{filter:?}: {plan}");
        }
    }
    for plan in plans(connection, list::TRAIL, "('e1', 100)").await {
        assert!(plan.contains("Index Scan using audit_log_event") && !plan.contains("Sort"), "{plan}");
    }
}

#[tokio::test]
async fn the_audit_log_is_read_by_its_indexes_with_statistics_without_and_with_old_ones() {
    check(tables(&[]).await).await;
    check(tables(&["ANALYZE audit_log", FILL]).await).await;
    check(tables(&[FILL, "ANALYZE audit_log"]).await).await;
}

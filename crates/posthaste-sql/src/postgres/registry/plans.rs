//! How PostgreSQL executes the look-ups of the registry, and those of an ingest.

use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{PageRequest, SubscriptionFilter};
use posthaste_core::outbox::{Mode, TableName};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{definitions, items, subscriptions};
use crate::postgres::channels::UNFINISHED_TYPES;
use crate::postgres::log::{READ, WRITE};
use crate::postgres::outbox::fill;
use crate::postgres::outbox::ingest::READ_BACK;
use crate::postgres::{migrations, plans};

/// Ten thousand definitions, each with ten subscriptions of a hundred subscribers, and events of ten types.
const FILLED: &str = "INSERT INTO event_definition (id, source_service, event_type, resource_type, operation_type)
         SELECT 'd' || n, 's' || n % 10, 't' || n, '*', '*' FROM generate_series(1, 10000) AS n;
     INSERT INTO subscription (id, subscriber_id, definition_id, endpoint, endpoint_digest, payload_type, auth_type,
             credentials_sealed, active)
         SELECT 's' || n, 'b' || n % 100, 'd' || 1 + n / 10, 'e', n::text::bytea, 'p', 'a', '', true
         FROM generate_series(0, 99999) AS n;
     INSERT INTO outbox_event (event_id, event_type, payload, status)
         SELECT 'e' || n, 't' || n % 10, '{}', n % 2 FROM generate_series(1, 100000) AS n";

const ANALYZE: &str = "ANALYZE event_definition, subscription, outbox_event";

async fn check(steps: &[&str]) {
    let mut connection = PgConnection::connect(&servers::postgres().await).await.unwrap();
    let connection = &mut connection;
    migrations::DIALECT.hub().run(&mut *connection).await.unwrap();
    migrations::DIALECT.outbox(&TableName::default()).run(&mut *connection).await.unwrap();
    let settings = "ALTER TABLE event_definition SET (autovacuum_enabled = off);
        ALTER TABLE subscription SET (autovacuum_enabled = off); ALTER TABLE outbox_event SET (autovacuum_enabled = off)";
    for step in [settings].iter().chain(steps) {
        sqlx::raw_sql(AssertSqlSafe(*step)).execute(&mut *connection).await.unwrap();
    }
    sqlx::raw_sql(READ).execute(&mut *connection).await.unwrap();
    definitions_and_subscriptions_are_listed_by_an_index(connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    sqlx::raw_sql(WRITE).execute(&mut *connection).await.unwrap();
    a_change_looks_up_what_exists(connection).await;
    an_ingest_looks_up_its_events_and_types(connection).await;
}

async fn plans_of(connection: &mut PgConnection, sql: &str, values: &str) -> Vec<String> {
    let plans = plans::plans(connection, sql, values).await;
    plans.iter().for_each(|plan| assert!(!plan.contains("Seq Scan") && !plan.contains("Bitmap"), "{plan}"));
    plans
}

async fn definitions_and_subscriptions_are_listed_by_an_index(connection: &mut PgConnection) {
    let after = PageRequest { after: Some("id".to_owned()), page: 0, size: 50 };
    let text = |text: &str| Some(text.to_owned());
    for (filter, index, values) in [
        (SubscriptionFilter::default(), "pkey", ""),
        (SubscriptionFilter { subscriber_id: text("b1"), definition_id: None }, "subscriber", "'b1', "),
        (SubscriptionFilter { subscriber_id: None, definition_id: text("d1") }, "definition", "'d1', "),
    ] {
        let conditions = |query: &mut _| subscriptions::push_conditions(query, &filter);
        let list = items(subscriptions::COLUMNS, "subscription", &after, conditions).sql().as_str().to_owned();
        for plan in plans_of(connection, &list, &format!("({values}'id', 51)")).await {
            assert!(plan.contains(&format!("using subscription_{index}")) && !plan.contains("Sort"), "{plan}");
        }
    }
}

async fn a_change_looks_up_what_exists(connection: &mut PgConnection) {
    for plan in plans_of(connection, &definitions::of_key(), "('s1', 't1', '*', '*')").await {
        assert!(plan.contains("using event_definition_source_service_event_type"), "{plan}");
    }
    for plan in plans_of(connection, &subscriptions::same(), "('b1', 'd1', '1', NULL, NULL)").await {
        // By the address, or by another index of the subscriber or of the definition, which have few subscriptions.
        assert!(plan.contains("using subscription_"), "{plan}");
    }
}

async fn an_ingest_looks_up_its_events_and_types(connection: &mut PgConnection) {
    let sql = |template: &str| fill(template, &TableName::default(), Mode::MultiNode);
    for plan in plans_of(connection, &sql(READ_BACK), "('{e1,e2}')").await {
        assert!(plan.contains("using outbox_event_event_id_key"), "{plan}");
    }
    for plan in plans_of(connection, &sql(UNFINISHED_TYPES), "('{t1,t2}')").await {
        assert_eq!(plan.matches("outbox_event_pending_of_type").count(), 2, "{plan}");
        assert!(!plan.contains("Sort"), "{plan}");
    }
}

#[tokio::test]
async fn plans_hold_without_statistics() {
    check(&[FILLED]).await;
}

#[tokio::test]
async fn plans_are_the_same_while_the_tables_are_empty() {
    check(&[]).await;
}

#[tokio::test]
async fn plans_hold_with_the_statistics_of_now() {
    check(&[FILLED, ANALYZE]).await;
}

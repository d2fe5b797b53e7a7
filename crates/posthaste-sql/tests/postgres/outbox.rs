//! Behaviour that only PostgreSQL has: its texts, its times, and rows that `psql` writes.

use std::process::Command;

use bytes::Bytes;
use posthaste_core::outbox::{Mode, Reader};
use posthaste_core::{Event, Payload, Source};
use posthaste_sql::TableName;
use sqlx::AssertSqlSafe;

use crate::support::{LEASE, MODES, Postgres, event, open};

#[tokio::test]
async fn a_database_that_cannot_keep_every_text_is_refused() {
    let postgres = Postgres::start().await;
    postgres.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'").await;
    let (server, _) = postgres.url.rsplit_once('/').unwrap();
    let pool = sqlx::PgPool::connect(&format!("{server}/latin")).await.unwrap();
    let refused = open(pool, TableName::default(), Reader::Dispatcher, Mode::MultiNode).await;
    let error = refused.err().unwrap().to_string();
    assert!(error.contains("LATIN1") && error.contains("UTF8"), "{error}");
}

#[tokio::test]
async fn a_text_with_the_one_character_that_postgres_lacks_stays_text() {
    let postgres = Postgres::start().await;
    let outbox = postgres.dispatcher(Mode::SingleNode).await;
    // A single event has a statement of its own, so it is also written together with others.
    postgres.write(&outbox, &[&event("1", "t", "a\0b")]).await;
    let bytes = Event::builder("t").bytes(Bytes::from_static(b"a\0b")).build().unwrap();
    postgres.write(&outbox, &[&event("2", "t", "ab"), &event("3", "t", "\0"), &bytes]).await;
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    let payloads: Vec<&Payload> = items.iter().map(|claimed| claimed.item.event.payload()).collect();
    let text = |text: &str| Payload::Text(text.to_owned());
    assert_eq!(payloads, [&text("a\0b"), &text("ab"), &text("\0"), bytes.payload()]);
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM outbox_event WHERE payload_is_text").await, 2);
}

#[tokio::test]
async fn foreign_inserts_need_two_columns() {
    for mode in MODES {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let psql = Command::new("psql")
            .args([&postgres.url, "-q", "-v", "ON_ERROR_STOP=1", "-c"])
            .arg(
                r#"INSERT INTO outbox_event (event_type, payload) VALUES ('plain', '{"a" : "\\x41 \n"}');
                   INSERT INTO outbox_event (event_type, payload, available_at)
                       VALUES ('past', '{}', '2026-01-01T00:00:00+02:00'), ('future', '{}', '2999-01-01T00:00:00Z');
                   INSERT INTO outbox_event (event_type, payload, headers, occurred_at)
                       VALUES ('full', '{}', '{"z":"1","a":"2"}', '2026-01-01 10:00:00+00')"#,
            )
            .output()
            .expect("the program psql is installed: run ./test, or apt-get install postgresql-client");
        assert!(psql.status.success(), "{}", String::from_utf8_lossy(&psql.stderr));
        let claim = outbox.dispatcher_source().claim(10).await.unwrap();
        let types: Vec<&str> = claim.items.iter().map(|claimed| claimed.item.event.event_type()).collect();
        assert_eq!(types, ["past", "plain", "full"], "in the order of becoming due");
        assert_eq!(claim.items[1].item.event.payload().as_bytes(), br#"{"a" : "\\x41 \n"}"#);
        assert_eq!(claim.items[1].item.event.id().len(), 36);
        let headers = [("z".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        assert_eq!(claim.items[2].item.event.headers(), headers, "in their order");
        assert_eq!(claim.items[2].item.event.occurred_at().to_rfc3339(), "2026-01-01T10:00:00+00:00");
        assert!(claim.next_due.unwrap() > LEASE / 4, "the future is far");
    }
}

#[tokio::test]
async fn unreadable_times_are_refused_at_insert() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::SingleNode).await;
    for insert in [
        "INSERT INTO outbox_event (event_type, payload, occurred_at) VALUES ('t', '{}', '-infinity')",
        "INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', 'infinity')",
        "INSERT INTO outbox_event (event_type, payload, occurred_at) VALUES ('t', '{}', '20000-01-01')",
        "INSERT INTO outbox_event (event_type, payload, created_at) VALUES ('t', '{}', '0044-03-15 BC')",
    ] {
        assert!(sqlx::raw_sql(insert).execute(&postgres.pool).await.is_err(), "{insert}");
    }
}

/// PostgreSQL reads a name without quotes in lower case: two services that spell it in two ways share the table.
#[tokio::test]
async fn capital_letters_in_the_name_of_a_table_do_not_matter() {
    let postgres = Postgres::start().await;
    let open =
        |name: &str| open(postgres.pool.clone(), TableName::new(name).unwrap(), Reader::Dispatcher, Mode::MultiNode);
    let (one, other) = (open("Order").await.unwrap(), open("order").await.unwrap());
    postgres.write(&one, &[&event("1", "t", "{}")]).await;
    assert_eq!(other.dispatcher_source().claim(10).await.unwrap().items.len(), 1);
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM \"order\"").await, 1);
}

#[tokio::test]
async fn a_text_that_is_too_long_is_refused_at_insert() {
    let postgres = Postgres::start().await;
    postgres.dispatcher(Mode::SingleNode).await;
    for column in ["event_type", "aggregate_type", "aggregate_id", "tenant_id", "source_service", "content_type"] {
        let rest = if column == "event_type" { "" } else { ", event_type" };
        let value = if column == "event_type" { "" } else { ", 't'" };
        let insert = |length: usize| {
            format!("INSERT INTO outbox_event (payload, {column}{rest}) VALUES ('', repeat('é', {length}){value})")
        };
        sqlx::raw_sql(AssertSqlSafe(insert(255))).execute(&postgres.pool).await.unwrap();
        let refused = sqlx::raw_sql(AssertSqlSafe(insert(256))).execute(&postgres.pool).await.unwrap_err();
        assert!(refused.to_string().contains("outbox_event_lengths"), "{refused}");
    }
}

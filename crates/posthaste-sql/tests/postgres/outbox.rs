//! Behaviour that only PostgreSQL has: its texts and times.

use bytes::Bytes;
use posthaste_core::outbox::{Mode, Reader};
use posthaste_core::{Event, Payload, Source};
use posthaste_sql::TableName;

use crate::support::{Postgres, event, open};

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

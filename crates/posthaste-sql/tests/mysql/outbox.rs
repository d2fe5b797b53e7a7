//! Behaviour that only MariaDB has: its texts, its times and its numbers.

use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OperatorStore, Reader};
use posthaste_core::{Disposition, Event, Failure, Settled, Source};
use posthaste_sql::TableName;

use crate::support::{MODES, MySql, event, ids, open, settle};

#[tokio::test]
async fn every_text_is_kept_also_in_a_database_of_latin1() {
    let mysql = MySql::start().await;
    sqlx::raw_sql("SET @sql = CONCAT('ALTER DATABASE ', DATABASE(), ' CHARACTER SET latin1'); EXECUTE IMMEDIATE @sql")
        .execute(&mysql.pool)
        .await
        .unwrap();
    let outbox = mysql.dispatcher(Mode::ORDERED).await;
    let text = "漢字 😀 \u{301}";
    let written =
        Event::text("ереванъ", text).id("1".to_owned()).aggregate("ключ", "漢😀").header("é", text).build().unwrap();
    mysql.write(&outbox, &[&written, &event("2", "t", "{}")]).await;
    let source = outbox.dispatcher_source();
    let items = source.claim(10).await.unwrap().items;
    let read = &items[0].item.event;
    assert_eq!((read.event_type(), read.aggregate_id(), read.headers()), ("ереванъ", Some("漢😀"), written.headers()));
    assert_eq!(read.payload(), written.payload());
    let failed = Disposition::Dead(Failure::permanent("x", text));
    assert_eq!(settle(&source, &items[0], failed).await, Settled::Applied);
    assert_eq!(outbox.store().find("1").await.unwrap().unwrap().last_error.unwrap(), format!("x: {text}"));
}

/// Where several servers share a table, the numbers of rows have gaps.
#[tokio::test]
async fn an_insert_returns_the_number_of_each_event() {
    let mysql = MySql::start().await;
    let outbox = mysql.dispatcher(Mode::SingleNode).await;
    let mut transaction = mysql.pool.begin().await.unwrap();
    sqlx::raw_sql("SET SESSION auto_increment_increment = 7").execute(&mut *transaction).await.unwrap();
    let events: Vec<Event> = (0..510).map(|number| event(&format!("e{}", 510 - number), "t", "{}")).collect();
    let rows = outbox.store().insert(&mut transaction, &events.iter().collect::<Vec<_>>(), None).await.unwrap();
    sqlx::raw_sql("SET SESSION auto_increment_increment = DEFAULT").execute(&mut *transaction).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(rows.is_sorted() && rows.len() == 510);
    for place in [0, 1, 255, 499, 500, 509] {
        assert_eq!(outbox.store().find(events[place].id()).await.unwrap().unwrap().seq, rows[place]);
    }
}

/// The time zone of the service's session must not matter.
#[tokio::test]
async fn times_are_in_utc_whatever_the_session_says() {
    for mode in MODES {
        let mysql = MySql::start().await;
        let options: sqlx::mysql::MySqlConnectOptions = mysql.url.parse().unwrap();
        let options = options.timezone(Some("-09:30".to_owned()));
        let pool = sqlx::MySqlPool::connect_with(options).await.unwrap();
        let outbox = open(pool.clone(), TableName::default(), Reader::Dispatcher, mode).await.unwrap();
        sqlx::query("INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('plain', 't', '')")
            .execute(&pool)
            .await
            .unwrap();
        let mut transaction = pool.begin().await.unwrap();
        outbox.store().insert(&mut transaction, &[&event("ours", "t", "{}")], None).await.unwrap();
        transaction.commit().await.unwrap();
        let source = outbox.dispatcher_source();
        assert_eq!(ids(&source.claim(1).await.unwrap().items), ["plain"]);
        assert_eq!(ids(&source.claim(1).await.unwrap().items), ["ours"], "also after a position");
        for id in ["plain", "ours"] {
            let row = outbox.store().find(id).await.unwrap().unwrap();
            let age = chrono::Utc::now() - row.created_at;
            assert!(age.abs() < chrono::TimeDelta::minutes(5), "{id} is {age} old");
        }
    }
}

#[tokio::test]
async fn unreadable_times_are_refused_at_insert() {
    let mysql = MySql::start().await;
    mysql.dispatcher(Mode::SingleNode).await;
    for insert in [
        "INSERT INTO outbox_event (event_type, payload, occurred_at) VALUES ('t', '{}', '0000-00-00')",
        "INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', '2026-00-00')",
        "INSERT INTO outbox_event (event_type, payload, created_at) VALUES ('t', '{}', '2026-11-00')",
        "INSERT INTO outbox_event (event_type, payload, done_at) VALUES ('t', '{}', '20000-01-01')",
    ] {
        assert!(sqlx::raw_sql(insert).execute(&mysql.pool).await.is_err(), "{insert}");
    }
}

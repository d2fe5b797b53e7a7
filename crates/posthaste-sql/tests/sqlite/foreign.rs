//! Rows that other programs write: with the program `sqlite3`, and with the values that other languages bind.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bytes::Bytes;
use chrono::{TimeDelta, Utc};
use posthaste_core::outbox::{Mode, OperatorStore, OutboxStatus};
use posthaste_core::{Disposition, Payload, Settled, Source};

use crate::support::{File, LEASE, MODES, ids, settle};

/// Runs statements with the program `sqlite3`.
fn sqlite3(file: &File, sql: &str) -> Output {
    // `sqlite3` waits for the lock of the file: connections of the outbox may be closing.
    let mut program = Command::new("sqlite3");
    program.args(["-bail", "-cmd", ".timeout 5000"]).arg(file.path()).arg(sql);
    let program = program.stdin(Stdio::null()).output();
    program.expect("the program sqlite3 is installed: run ./test, or apt-get install sqlite3")
}

fn insert(file: &File, sql: &str) {
    let output = sqlite3(file, sql);
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn a_blob_in_the_column_payload_is_delivered_byte_for_byte() {
    for mode in MODES {
        let file = File::new();
        let outbox = file.dispatcher(mode).await;
        insert(
            &file,
            "INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('1', 't', x'ff00fe');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('2', 't', x'7b7d');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('3', 't', x'');
             INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('4', 't', '{}');
             INSERT INTO outbox_event (event_id, event_type, payload_bytes) VALUES ('5', 't', x'7b7d');",
        );
        // Python binds `bytes` as a BLOB.
        let bound = sqlx::query("INSERT INTO outbox_event (event_id, event_type, payload) VALUES ('6', 't', ?)");
        bound.bind(&b"\x00bound\xff"[..]).execute(&file.pool().await).await.unwrap();
        let source = outbox.dispatcher_source();
        let items = source.claim(10).await.unwrap().items;
        assert_eq!(ids(&items), ["1", "2", "3", "4", "5", "6"], "{mode:?}");
        let bytes = |bytes: &'static [u8]| Payload::Bytes(Bytes::from_static(bytes));
        let expected = [
            bytes(b"\xff\x00\xfe"),
            bytes(b"{}"),
            bytes(b""),
            Payload::Text("{}".to_owned()),
            bytes(b"{}"),
            bytes(b"\x00bound\xff"),
        ];
        for (claimed, payload) in items.iter().zip(&expected) {
            let id = claimed.item.event.id();
            assert_eq!(claimed.item.event.payload(), payload, "{id}");
            assert_eq!(settle(&source, claimed, Disposition::Done).await, Settled::Applied);
            let row = outbox.store().find(id).await.unwrap().unwrap();
            assert_eq!((row.status, row.event.unwrap().payload()), (OutboxStatus::Done, payload), "{id}");
        }
    }
}

/// The time that is `offset` from now, in every format that SQLite knows or that a program may store as a number.
fn forms(offset: &str) -> [String; 8] {
    [
        format!("datetime('now', '{offset}')"),
        format!("strftime('%Y-%m-%d %H:%M', 'now', '{offset}')"),
        format!("strftime('%Y-%m-%d %H:%M:%f', 'now', '{offset}')"),
        format!("strftime('%Y-%m-%dT%H:%M:%SZ', 'now', '{offset}')"),
        format!("strftime('%Y-%m-%d %H:%M:%S+02:00', 'now', '{offset}', '+2 hours')"),
        format!("CAST(strftime('%s', 'now', '{offset}') AS INTEGER)"),
        format!("strftime('%s', 'now', '{offset}') + 0.25"),
        format!("julianday('now', '{offset}')"),
    ]
}

#[tokio::test]
async fn a_delay_is_honoured_in_every_time_format_of_sqlite() {
    for mode in MODES {
        let file = File::new();
        let outbox = file.dispatcher(mode).await;
        for (offset, name) in [("+3 hours", "later"), ("-3 hours", "earlier")] {
            for (place, form) in forms(offset).into_iter().enumerate() {
                insert(
                    &file,
                    &format!(
                        "INSERT INTO outbox_event (event_id, event_type, payload, available_at)
                         VALUES ('{name}-{place}', 't', '{{}}', {form})"
                    ),
                );
            }
        }
        let claim = outbox.dispatcher_source().claim(100).await.unwrap();
        let mut claimed = ids(&claim.items);
        claimed.sort();
        let earlier: Vec<String> = (0..forms("").len()).map(|place| format!("earlier-{place}")).collect();
        assert_eq!(claimed, earlier, "{mode:?}");
        assert!(claim.next_due.unwrap() > LEASE / 4, "a later row is not due soon");
        for place in 0..forms("").len() {
            let row = outbox.store().find(&format!("later-{place}")).await.unwrap().unwrap();
            let wait = row.available_at - Utc::now();
            assert!((TimeDelta::minutes(178)..TimeDelta::minutes(181)).contains(&wait), "{place}: {wait}");
            assert!(row.event.unwrap().is_delayed(), "{place}");
        }
    }
}

#[tokio::test]
async fn a_delay_of_seconds_ends_when_the_seconds_have_passed() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    insert(
        &file,
        "INSERT INTO outbox_event (event_type, payload, available_at) VALUES ('t', '{}', datetime('now', '+2 seconds'))",
    );
    let source = outbox.dispatcher_source();
    let due_at: i64 = file.ask("SELECT CAST(strftime('%s', available_at) AS INTEGER) FROM outbox_event").await;
    loop {
        let claim = source.claim(1).await.unwrap();
        if !claim.items.is_empty() {
            break;
        }
        let wait = claim.next_due.expect("it has a due time");
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        tokio::time::sleep(wait).await;
    }
    assert!(Utc::now().timestamp() >= due_at, "not before its time");
}

#[tokio::test]
async fn occurred_at_is_read_in_every_time_format_of_sqlite() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::SingleNode).await;
    for (place, written) in
        ["'2026-01-01 10:00:00'", "'2026-01-01T10:00'", "'2026-01-01 12:00:00.000 +02:00'", "1767261600"]
            .into_iter()
            .enumerate()
    {
        insert(
            &file,
            &format!(
                "INSERT INTO outbox_event (event_id, event_type, payload, occurred_at, created_at)
                 VALUES ('{place}', 't', '{{}}', {written}, {written})"
            ),
        );
    }
    let items = outbox.dispatcher_source().claim(10).await.unwrap().items;
    assert_eq!(ids(&items), ["0", "1", "2", "3"]);
    for claimed in &items {
        let event = &claimed.item.event;
        assert_eq!(event.occurred_at().to_rfc3339(), "2026-01-01T10:00:00+00:00", "{}", event.id());
        let row = outbox.store().find(event.id()).await.unwrap().unwrap();
        assert_eq!(row.created_at, event.occurred_at(), "{}", event.id());
    }
}

#[tokio::test]
async fn unreadable_times_are_refused_at_insert() {
    let file = File::new();
    file.dispatcher(Mode::SingleNode).await;
    // Without a date; not a date; Unix milliseconds, which would be about the year 50000; out of range; not a text.
    let unreadable = [
        "'12:00'",
        "'now'",
        "'soon'",
        "''",
        "'2026-13-01'",
        "'2026-01-01 25:00'",
        "'2026-01-01 noon'",
        "1767261600000",
        "0",
        "-1",
        "'10000-01-01'",
        "x'323032362d30312d3031'",
    ];
    for column in ["available_at", "created_at", "occurred_at"] {
        for written in unreadable {
            let sql =
                format!("INSERT INTO outbox_event (event_type, payload, {column}) VALUES ('t', '{{}}', {written})");
            let output = sqlite3(&file, &sql);
            let says = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{sql}");
            assert!(says.contains(&format!("CHECK constraint failed: outbox_event_{column}")), "{sql}: {says}");
        }
    }
    assert_eq!(file.ask::<i64>("SELECT count(*) FROM outbox_event").await, 0);
}

#[tokio::test]
async fn a_text_that_is_too_long_is_refused_at_insert() {
    let file = File::new();
    file.dispatcher(Mode::SingleNode).await;
    for column in ["event_type", "aggregate_type", "aggregate_id", "tenant_id", "source_service", "content_type"] {
        let rest = if column == "event_type" { "" } else { ", event_type" };
        let value = if column == "event_type" { "" } else { ", 't'" };
        let sql = |length: usize| {
            let long = "é".repeat(length);
            format!("INSERT INTO outbox_event (payload, {column}{rest}) VALUES ('', '{long}'{value})")
        };
        insert(&file, &sql(255));
        let refused = sqlite3(&file, &sql(256));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("outbox_event_lengths"), "{column}: {refused:?}");
    }
}

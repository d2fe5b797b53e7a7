//! N: headers are written to their column and read back.

use posthaste::{Event, Mode};

use crate::harness::{
    Database, Harness, claim, event, node, on_every_database, on_every_store, row, row_when, write, writer,
};

on_every_store! {
    n1_headers_keep_their_order_and_every_character,
}

on_every_database! {
    n1_headers_are_written_as_json,
    n2_headers_of_other_programs_are_read_leniently,
    n2_headers_that_are_not_an_object_of_texts_are_refused,
}

/// Characters that JSON must escape, and some that it need not.
const AWKWARD: [(&str, &str); 6] = [
    ("zebra", "first"),
    ("quote\"d", "back\\slash / slash"),
    ("lines", "a\nb\r\nc\td"),
    ("control", "\u{1}\u{1f}\u{8}\u{c}"),
    ("unicode é", "\u{1f600} \u{2028} ü"),
    ("aardvark", ""),
];

fn awkward() -> Event {
    let headers = AWKWARD.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Event::text("t", "{}").headers(headers).build().unwrap()
}

fn pairs(event: &Event) -> Vec<(&str, &str)> {
    event.headers().iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

async fn n1_headers_keep_their_order_and_every_character<H: Harness>(db: H) {
    let outbox = writer(&db).await;
    let ids = write(&outbox, &[awkward(), event()]).await;
    assert_eq!(pairs(&row(&outbox, &ids[0]).await.event.unwrap()), AWKWARD);
    assert!(row(&outbox, &ids[1]).await.event.unwrap().headers().is_empty());
    let claimed = claim(&node(&db, Mode::SingleNode).await, 2).await;
    assert_eq!(pairs(&claimed[0].item.event), AWKWARD);
}

async fn n1_headers_are_written_as_json<H: Database>(db: H) {
    let ids = write(&writer(&db).await, &[awkward()]).await;
    let text = db.text(&format!("SELECT headers FROM outbox_event WHERE event_id = '{}'", ids[0])).await.unwrap();
    let read: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (name, value) in AWKWARD {
        assert_eq!(read[name], value, "{text}");
    }
    assert!(text.starts_with("{\"zebra\":\"first\",") && text.contains("\\u0001") && text.contains("a\\nb\\r\\nc\\td"));
}

/// Writes this text into the headers column, as another program would.
async fn with_headers<H: Database>(db: &H, headers: &str) -> String {
    let event = event();
    write(&writer(db).await, std::slice::from_ref(&event)).await;
    let quoted = headers.replace('\'', "''").replace('\\', H::BACKSLASH);
    db.execute(&format!("UPDATE outbox_event SET headers = '{quoted}' WHERE event_id = '{}'", event.id())).await;
    event.id().to_owned()
}

async fn n2_headers_of_other_programs_are_read_leniently<H: Database>(db: H) {
    let outbox = writer(&db).await;
    for (text, expected) in [
        ("{}", &[][..]),
        ("null", &[]),
        ("", &[]),
        ("  ", &[]),
        ("{\"a\": \"1\", \"b\": null}", &[("a", "1")]),
        (" {\n\t\"a\" : \"1\" ,\r\n \"b\":\"2\"} ", &[("a", "1"), ("b", "2")]),
        ("{\"\\u0061\": \"\\u00e9 \\ud83d\\ude00 \\/\"}", &[("a", "é \u{1f600} /")]),
    ] {
        let id = with_headers(&db, text).await;
        let event = row(&outbox, &id).await.event.unwrap_or_else(|| panic!("{text:?} can be read"));
        assert_eq!(pairs(&event), expected, "{text:?}");
    }
}

async fn n2_headers_that_are_not_an_object_of_texts_are_refused<H: Database>(db: H) {
    let outbox = writer(&db).await;
    let mut ids = Vec::new();
    for text in [
        "[]",
        "\"text\"",
        "7",
        "{\"a\": 1}",
        "{\"a\": \"\\u00zz\"}",
        "{\"a\": \"\\x\"}",
        "{\"a\": \"unterminated",
        "{\"a\": \"\\ud83d\"}",
        "{\"a\": \"1\"} more",
    ] {
        let id = with_headers(&db, text).await;
        assert!(row(&outbox, &id).await.event.is_none(), "{text:?}");
        ids.push(id);
    }
    assert!(claim(&node(&db, Mode::SingleNode).await, 20).await.is_empty());
    for id in ids {
        let row = row_when(&outbox, &id, |row| row.status == posthaste::OutboxStatus::Dead).await;
        assert!(row.last_error.unwrap().contains("headers"));
    }
}

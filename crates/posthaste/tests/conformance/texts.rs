//! Texts that not every database can store unchanged, on every path of an event.

use bytes::Bytes;
use posthaste::{Event, EventBuilder, EventError, MAX_EVENT_ID, MAX_FIELD, Mode, Payload};
use posthaste_core::{Disposition, Settled};

use crate::harness::{
    Calls, Harness, all_done, claim, dispatcher, on_every_store, outbox, settle, write, write_plain, write_to,
};

on_every_store! {
    a_text_with_nul_is_delivered_unchanged_on_every_path,
    the_longest_names_are_kept_in_every_mode,
}

/// On the hot path and on the cold path, in every mode.
async fn a_text_with_nul_is_delivered_unchanged_on_every_path<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let db = H::start().await;
        let calls = Calls::default();
        let outbox = outbox(&db, &calls, |builder| builder.mode(mode)).await;
        let text = || Event::text("t", "a\0b").header("h", "c\0d").build().unwrap();
        let bytes = || Event::builder("t").bytes(Bytes::from_static(b"a\0b")).build().unwrap();
        for written in [text(), bytes()] {
            let ids = write(&outbox, std::slice::from_ref(&written)).await;
            all_done(&outbox, &ids).await;
        }
        let ids = write_plain(&db, &outbox, &[text(), bytes()]).await;
        all_done(&outbox, &ids).await;
        outbox.close().await;
        let payloads: Vec<Payload> = calls.events().iter().map(|event| event.payload().clone()).collect();
        let [text, bytes] = [text(), bytes()].map(|event| event.payload().clone());
        assert_eq!(payloads[..2], [text.clone(), bytes.clone()], "hot, {mode:?}");
        for payload in [&text, &bytes] {
            assert!(payloads[2..].contains(payload), "cold, {mode:?}: {payloads:?}");
        }
        let headers = calls.events().iter().filter(|event| event.header("h") == Some("c\0d")).count();
        assert_eq!(headers, 2, "{mode:?}");
    }
}

/// For each short field, the name of the field and an event with this text in it.
fn with_each_field(text: &str) -> [(&'static str, EventBuilder); 8] {
    let (event, text) = (|| Event::text("t", "{}"), || text.to_owned());
    [
        ("event_type", Event::text(text(), "{}")),
        ("aggregate_type", event().aggregate_type(text())),
        ("aggregate_id", event().aggregate_id(text())),
        ("tenant_id", event().tenant_id(text())),
        ("source_service", event().source_service(text())),
        ("resource_type", event().resource_type(text())),
        ("operation_type", event().operation_type(text())),
        ("content_type", event().content_type(text())),
    ]
}

/// Fills all fields with the character that needs the most bytes. The widest index must have room for it.
async fn the_longest_names_are_kept_in_every_mode<H: Harness>(db: H) {
    drop(db);
    let longest = "\u{1f600}".repeat(MAX_FIELD);
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let db = H::start().await;
        let table = dispatcher(&db, mode).await;
        let event = Event::text(longest.clone(), "{}")
            .id("x".repeat(MAX_EVENT_ID))
            .aggregate(longest.clone(), longest.clone())
            .tenant_id(longest.clone())
            .source_service(longest.clone())
            .resource_type(longest.clone())
            .operation_type(longest.clone())
            .content_type(longest.clone())
            .build()
            .unwrap();
        write_to(&table, std::slice::from_ref(&event)).await;
        let source = table.dispatcher_source();
        let claimed = claim(&source, 1).await;
        let read = &claimed[0].item.event;
        assert_eq!((read.id(), read.event_type()), (event.id(), event.event_type()), "{mode:?}");
        assert_eq!((read.aggregate_type(), read.aggregate_id()), (event.aggregate_type(), event.aggregate_id()));
        assert_eq!((read.tenant_id(), read.source_service()), (event.tenant_id(), event.source_service()));
        assert_eq!((read.resource_type(), read.operation_type()), (event.resource_type(), event.operation_type()));
        assert_eq!(read.content_type(), event.content_type());
        assert_eq!(settle(&source, &claimed[0], Disposition::Done).await, Settled::Applied);
    }
}

#[test]
fn nul_is_refused_in_every_short_field() {
    for (field, event) in with_each_field("a\0b") {
        let error = event.build().unwrap_err();
        assert_eq!(error, EventError::Nul { field });
        assert!(error.to_string().contains("U+0000"), "{error}");
    }
}

#[test]
fn a_name_that_is_too_long_is_refused_when_the_event_is_built() {
    for (field, event) in with_each_field(&"é".repeat(10_000)) {
        let error = event.build().unwrap_err();
        assert_eq!(error, EventError::TooLong { field, length: 10_000 });
        assert!(error.to_string().contains(field) && error.to_string().contains("255"), "{error}");
    }
    assert!(with_each_field(&"é".repeat(MAX_FIELD)).into_iter().all(|(_, event)| event.build().is_ok()));
}

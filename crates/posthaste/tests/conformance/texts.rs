//! Texts that not every database keeps as they are, on every way that an event can go.

use bytes::Bytes;
use posthaste::{Event, EventError, Mode, Payload};

use crate::harness::{Calls, Harness, all_done, on_every_store, outbox, write, write_plain};

on_every_store! {
    a_text_with_the_character_zero_is_a_text_on_every_way,
}

/// By the hot path, by the table, and when it is replayed, whatever the mode.
async fn a_text_with_the_character_zero_is_a_text_on_every_way<H: Harness>(db: H) {
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

#[test]
fn the_character_zero_is_refused_in_every_short_text() {
    let bad = || "a\0b".to_owned();
    let event = || Event::text("t", "{}");
    for (field, event) in [
        ("event_type", Event::text(bad(), "{}")),
        ("aggregate_type", event().aggregate_type(bad())),
        ("aggregate_id", event().aggregate_id(bad())),
        ("tenant_id", event().tenant_id(bad())),
        ("source_service", event().source_service(bad())),
        ("resource_type", event().resource_type(bad())),
        ("operation_type", event().operation_type(bad())),
        ("content_type", event().content_type(bad())),
    ] {
        let error = event.build().unwrap_err();
        assert_eq!(error, EventError::Nul { field });
        assert!(error.to_string().contains("U+0000"), "{error}");
    }
}

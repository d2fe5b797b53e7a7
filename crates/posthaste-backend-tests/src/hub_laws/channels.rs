//! The laws of [`ChannelStore`]: the ingest of events, and the owners of topics.

use std::sync::Arc;

use bytes::Bytes;
use posthaste_core::hub_store::Ingested::{Conflict, Known, Stored, Withheld};
use posthaste_core::hub_store::{Admission, ChannelStore, HubOptions, Ingested, Refusal};
use posthaste_core::outbox::OutboxStatus;
use posthaste_core::{Event, Source};

use super::{HubHarness, options};

fn event(id: &str, event_type: &str, payload: &str) -> Arc<Event> {
    Arc::new(Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap())
}

/// Ingests events whose types all have a channel.
async fn ingest(channels: &Arc<dyn ChannelStore>, events: Vec<Arc<Event>>, atomic: bool) -> Vec<Ingested> {
    let ingested = |admission| match admission {
        Admission::Ingested(ingested) => ingested,
        Admission::Refused(refusal) => panic!("refused: {refusal:?}"),
    };
    channels.ingest(events, atomic).await.unwrap().into_iter().map(ingested).collect()
}

/// The event types of the recorded channels.
async fn recorded(channels: &Arc<dyn ChannelStore>) -> Vec<String> {
    channels.load().await.unwrap().into_iter().map(|channel| channel.event_type).collect()
}

fn taken_by(owner: &str) -> Refusal {
    Refusal::TopicTaken { owner: owner.to_owned() }
}

/// Two events are the same if they have the same id, type and payload, in one batch or in two.
pub async fn the_same_event_again_is_known_and_another_with_its_id_is_a_conflict(harness: &impl HubHarness) {
    let stores = harness.open(options()).await;
    let first = ingest(&stores.channels, vec![event("1", "t", "{}"), event("2", "t", "{}")], false).await;
    assert_eq!(first, [Stored, Stored]);
    let bytes = Event::builder("t").id("1".to_owned()).bytes(Bytes::from_static(b"{}")).build().unwrap();
    let twin = event("4", "t", "{}");
    let batch = vec![
        event("1", "t", "{}"),
        event("2", "t", "{ }"),
        event("1", "other", "{}"),
        bytes.into(),
        event("3", "t", "{}"),
        event("3", "t", "{}"),
        event("3", "t", "[]"),
        twin.clone(),
        twin,
    ];
    let again = ingest(&stores.channels, batch, false).await;
    assert_eq!(again, [Known, Conflict, Conflict, Known, Stored, Known, Conflict, Stored, Known]);
    let due = stores.outbox.oldest_due_by_type().await.unwrap();
    assert_eq!(due.iter().map(|(event_type, _)| event_type.as_str()).collect::<Vec<_>>(), ["t"]);
    let items = stores.outbox.source("t").claim(10).await.unwrap().items;
    let stored: Vec<_> =
        items.iter().map(|claimed| (claimed.item.event.id(), claimed.item.event.payload().as_bytes())).collect();
    assert_eq!(stored, [("1", &b"{}"[..]), ("2", b"{}"), ("3", b"{}"), ("4", b"{}")], "the first stays");
    assert!(ingest(&stores.channels, Vec::new(), false).await.is_empty());
}

/// One conflict withholds all new events of the batch.
pub async fn an_atomic_batch_is_stored_whole_or_not_at_all(harness: &impl HubHarness) {
    let stores = harness.open(options()).await;
    let (channels, outbox) = (&stores.channels, &stores.outbox);
    ingest(channels, vec![event("1", "t", "{}")], false).await;
    let refused = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("1", "t", "[]")];
    assert_eq!(ingest(channels, refused, true).await, [Withheld, Known, Conflict]);
    let inside = vec![event("3", "t", "{}"), event("3", "t", "[]")];
    assert_eq!(ingest(channels, inside, true).await, [Withheld, Conflict]);
    assert!(outbox.find("2").await.unwrap().is_none() && outbox.find("3").await.unwrap().is_none());
    let accepted = vec![event("2", "t", "{}"), event("1", "t", "{}"), event("2", "t", "{}")];
    assert_eq!(ingest(channels, accepted, true).await, [Stored, Known, Known]);
    assert_eq!(outbox.find("2").await.unwrap().unwrap().status, OutboxStatus::New);
}

/// A type whose events are not stored, because they conflict or are withheld, owns no topic.
pub async fn a_type_owns_its_topic_from_its_first_stored_event(harness: &impl HubHarness) {
    let channels = harness.open(options()).await.channels;
    ingest(&channels, vec![event("1", "known", "{}")], false).await;
    let conflict = |event_type: &str| event("1", event_type, "[]");
    let withheld = ingest(&channels, vec![event("2", "a.b", "{}"), conflict("known")], true).await;
    assert_eq!(withheld, [Withheld, Conflict]);
    let collision = channels.ingest(vec![event("2", "a.b", "{}"), event("3", "a_b", "{}")], true).await.unwrap();
    assert_eq!(collision, [Admission::Ingested(Withheld), Admission::Refused(taken_by("a.b"))]);
    assert_eq!(recorded(&channels).await, ["known"]);

    let mixed = vec![conflict("a.b"), event("3", "a_b", "{}"), event("4", "a.b", "{}")];
    let mixed = channels.ingest(mixed, false).await.unwrap();
    let owner = Admission::Refused(taken_by("a_b"));
    assert_eq!(mixed, [Admission::Ingested(Conflict), Admission::Ingested(Stored), owner]);
    assert_eq!(
        channels.record(vec!["a.b".to_owned(), "a_b".to_owned()]).await.unwrap(),
        [Err(taken_by("a_b")), Ok(())]
    );
}

/// The limit holds for `ingest` and for `record`.
pub async fn no_more_channels_are_recorded_than_the_limit(harness: &impl HubHarness) {
    let channels = harness.open(HubOptions { max_channels: 2, ..options() }).await.channels;
    let events = ["one", "two", "three", "one"].iter().enumerate();
    let events = events.map(|(number, name)| event(&number.to_string(), name, "{}")).collect();
    let full = || Refusal::Full { limit: 2 };
    let stored = || Admission::Ingested(Stored);
    assert_eq!(
        channels.ingest(events, false).await.unwrap(),
        [stored(), stored(), Admission::Refused(full()), stored()]
    );
    let recorded = channels.record(vec!["four".to_owned(), "two".to_owned()]).await.unwrap();
    assert_eq!(recorded, [Err(full()), Ok(())]);
}

/// Another process, or the same after a restart, finds the same owners.
pub async fn an_owner_survives_a_restart(harness: &impl HubHarness) {
    let first = harness.open(options()).await.channels;
    ingest(&first, vec![event("1", "a.b", "{}")], false).await;
    assert_eq!(first.record(vec!["x_y".to_owned()]).await.unwrap(), [Ok(())]);
    let second = harness.open(options()).await.channels;
    let refused = second.ingest(vec![event("2", "a_b", "{}")], false).await.unwrap();
    assert_eq!(refused, [Admission::Refused(taken_by("a.b"))]);
    let mut types = recorded(&second).await;
    types.sort();
    assert_eq!(types, ["a.b", "x_y"]);
    assert_eq!(second.record(vec!["x.y".to_owned()]).await.unwrap(), [Err(taken_by("x_y"))]);
}

/// A channel that an operator paused stays paused until it is resumed, also across restarts. Its events are stored.
pub async fn a_paused_channel_stays_paused(harness: &impl HubHarness) {
    let channels = harness.open(options()).await.channels;
    assert!(!channels.set_paused("t", true).await.unwrap(), "there is no such channel yet");
    assert_eq!(ingest(&channels, vec![event("1", "t", "{}"), event("2", "u", "{}")], false).await, [Stored, Stored]);
    assert!(channels.set_paused("t", true).await.unwrap());
    assert_eq!(ingest(&channels, vec![event("3", "t", "{}")], false).await, [Stored]);
    let second = harness.open(options()).await.channels;
    assert!(second.set_paused("t", true).await.unwrap(), "it may be paused again");
    let paused = |channels: Arc<dyn ChannelStore>| async move {
        let mut states: Vec<(String, bool)> =
            channels.load().await.unwrap().into_iter().map(|channel| (channel.event_type, channel.is_paused)).collect();
        states.sort();
        states
    };
    assert_eq!(paused(second.clone()).await, [("t".to_owned(), true), ("u".to_owned(), false)]);
    assert!(second.set_paused("t", false).await.unwrap());
    assert_eq!(paused(channels).await, [("t".to_owned(), false), ("u".to_owned(), false)]);
}

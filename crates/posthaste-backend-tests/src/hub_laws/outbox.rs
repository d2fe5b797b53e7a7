//! The laws of [`HubOutbox`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use posthaste_core::hub_store::{Admission, HubOutbox, HubStores, Ingested};
use posthaste_core::outbox::OutboxStatus;
use posthaste_core::{Disposition, Event, Failure, Settled, Settlement};

use super::{HubHarness, LEASE, options, remove};

/// Ingests events of the type `t`, and settles those that have a disposition.
async fn ingest(stores: &HubStores, events: &[(&str, Option<Disposition>)]) {
    let event = |id: &str| Arc::new(Event::builder("t").id(id.to_owned()).text("{}".to_owned()).build().unwrap());
    let admitted = stores.channels.ingest(events.iter().map(|(id, _)| event(id)).collect(), false).await.unwrap();
    assert!(
        admitted.iter().all(|admission| matches!(admission, Admission::Ingested(Ingested::Stored))),
        "{admitted:?}"
    );
    let dispositions: HashMap<&str, &Option<Disposition>> = events.iter().map(|(id, end)| (*id, end)).collect();
    let source = stores.outbox.source("t");
    for claimed in &source.claim(events.len()).await.unwrap().items {
        if let Some(disposition) = dispositions[claimed.item.event.id()] {
            let settlement = Settlement { claimed, disposition, took: Duration::ZERO };
            assert_eq!(source.settle(&[settlement]).await.unwrap(), [Settled::Applied]);
        }
    }
}

async fn status(outbox: &dyn HubOutbox, event_id: &str) -> Option<OutboxStatus> {
    outbox.find(event_id).await.unwrap().map(|row| row.status)
}

/// Pending and DEAD rows are kept, and so are young ones.
pub async fn only_done_rows_are_removed_by_their_age(harness: &impl HubHarness) {
    let stores = harness.open(options()).await;
    let failure = || Failure::transient("500", "broken");
    let retry = Disposition::Retry { after: LEASE, counted: true, failure: Some(failure()) };
    let done = || Some(Disposition::Done);
    let dead = Some(Disposition::Dead(failure()));
    ingest(&stores, &[("1", done()), ("2", None), ("3", done()), ("4", Some(retry)), ("5", dead), ("6", done())]).await;
    let outbox = &*stores.outbox;
    assert_eq!(outbox.remove_done(LEASE, 10).await.unwrap(), 0);
    let removed = remove(3, async || outbox.remove_done(Duration::ZERO, 2).await.unwrap()).await;
    assert!(removed.iter().all(|batch| *batch <= 2), "{removed:?}");
    let mut left = Vec::new();
    for id in ["1", "2", "3", "4", "5", "6"] {
        left.extend(status(outbox, id).await.map(|status| (id, status)));
    }
    assert_eq!(left, [("2", OutboxStatus::New), ("4", OutboxStatus::Retry), ("5", OutboxStatus::Dead)]);
}

/// Each row is removed by one of them, and none waits for another.
pub async fn rows_are_removed_once_by_several_processes(harness: &impl HubHarness) {
    let stores = harness.open(options()).await;
    let ids: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    let events: Vec<_> = ids.iter().map(|id| (id.as_str(), Some(Disposition::Done))).collect();
    ingest(&stores, &events).await;
    let others = [harness.open(options()).await, harness.open(options()).await];
    let removed = remove(300, async || {
        let removed = [&stores, &others[0], &others[1]].map(|stores| stores.outbox.remove_done(Duration::ZERO, 7));
        futures_util::future::try_join_all(removed).await.unwrap().iter().sum()
    });
    assert!(removed.await.iter().all(|of_three| *of_three <= 21));
}

/// An event that is published after its row was removed is not known any more.
pub async fn the_id_of_a_removed_row_is_new_again(harness: &impl HubHarness) {
    let stores = harness.open(options()).await;
    for _ in 0..2 {
        ingest(&stores, &[("1", Some(Disposition::Done))]).await;
        remove(1, async || stores.outbox.remove_done(Duration::ZERO, 10).await.unwrap()).await;
        assert_eq!(status(&*stores.outbox, "1").await, None);
    }
}

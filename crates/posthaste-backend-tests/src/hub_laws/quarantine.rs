//! The laws of [`QuarantineStore`], and of [`Quarantine`](posthaste_core::bus::Quarantine), which fills it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{TimeDelta, Utc};
use posthaste_core::bus::{Fetched, Poison, Position};
use posthaste_core::hub_store::{
    ExpiredRecords, QuarantineCount, QuarantineFilter, QuarantineStatus, QuarantineStore, QuarantinedRow,
};

use super::{HubHarness, LEASE, options, remove};

/// A database with a quarantine. Each law gets a fresh one. Every [`HubHarness`] is one.
#[async_trait]
pub trait QuarantineHarness: Send + Sync {
    /// The quarantine.
    async fn open_quarantine(&self) -> Arc<dyn QuarantineStore>;
}

#[async_trait]
impl<H: HubHarness> QuarantineHarness for H {
    async fn open_quarantine(&self) -> Arc<dyn QuarantineStore> {
        self.open(options()).await.quarantine
    }
}

/// Expands to one test per law of [`QuarantineStore`], each on the fresh harness that the expression makes:
/// `quarantine_laws!(Harness::start().await)`.
#[macro_export]
macro_rules! quarantine_laws {
    ($harness:expr) => {
        $crate::quarantine_laws!(
            $harness =>
            a_record_is_quarantined_once_per_group
            another_record_at_a_known_position_is_quarantined
            a_quarantined_record_is_kept_unchanged
            the_quarantine_is_counted_by_group_and_topic
            the_list_is_filtered_and_newest_first
            a_page_of_the_quarantine_continues_after_its_cursor
            a_claimed_record_is_neither_claimed_again_nor_discarded
            only_the_current_claim_marks_a_record_as_replayed
            a_damaged_record_is_not_claimed
            a_discarded_record_keeps_its_reason_and_stays_discarded
            expired_records_of_every_status_are_removed
            a_record_that_is_being_replayed_is_not_removed
        );
    };
    ($harness:expr => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::hub_laws::quarantine::$law(&$harness).await;
            }
        )*
    };
}

fn poison(topic: &str, offset: i64) -> Poison {
    let record = Fetched {
        position: Position { topic: topic.into(), partition: 3, offset, generation: 1 },
        key: format!("key {offset}"),
        value: Bytes::from_static(b"\x00\xffvalue"),
        headers: vec![("b".to_owned(), "2".to_owned()), ("a".to_owned(), "é".to_owned())],
        damage: None,
    };
    Poison { record, reason: "unknown schema 7".to_owned() }
}

/// A topic that is deleted and created again has other records at the same offsets.
pub async fn another_record_at_a_known_position_is_quarantined(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    let before = poison("t", 1);
    let mut after = before.clone();
    after.record.value = Bytes::from_static(b"another");
    for _ in 0..2 {
        store.quarantine("g", &[before.clone(), after.clone()]).await.unwrap();
    }
    assert_eq!(rows(&*store, &QuarantineFilter::default()).await.len(), 2);
}

/// Quarantines one record after the other.
async fn fill(store: &dyn QuarantineStore, group: &str, topic: &str, offsets: std::ops::Range<i64>) {
    for offset in offsets {
        store.quarantine(group, &[poison(topic, offset)]).await.unwrap();
    }
}

async fn rows(store: &dyn QuarantineStore, filter: &QuarantineFilter) -> Vec<QuarantinedRow> {
    let page = store.list(filter, None, 500).await.unwrap();
    assert_eq!(page.items.len() as u64, page.total);
    page.items
}

async fn ids(store: &dyn QuarantineStore) -> Vec<String> {
    let mut rows = rows(store, &QuarantineFilter::default()).await;
    rows.sort_by_key(|row| row.offset);
    rows.into_iter().map(|row| row.id).collect()
}

async fn status(store: &dyn QuarantineStore, id: &str) -> (QuarantineStatus, Option<String>) {
    let row = store.get(id).await.unwrap().unwrap().row;
    (row.status, row.status_reason)
}

async fn in_quarantine(store: &dyn QuarantineStore) -> u64 {
    store.counts().await.unwrap().iter().map(|count| count.records).sum()
}

/// Quarantining the same record again changes nothing. Another group has its own entry.
pub async fn a_record_is_quarantined_once_per_group(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    let poison: Vec<Poison> = (0..100).map(|offset| poison("orders", offset)).collect();
    store.quarantine("group", &[]).await.unwrap();
    store.quarantine("group", &poison[..70]).await.unwrap();
    let before: HashSet<String> = ids(&*store).await.into_iter().collect();
    store.quarantine("group", &poison).await.unwrap();
    assert_eq!(in_quarantine(&*store).await, 100);
    store.quarantine("other", &poison[..1]).await.unwrap();
    assert_eq!(in_quarantine(&*store).await, 101);
    let after: HashSet<String> = ids(&*store).await.into_iter().collect();
    assert!(before.is_subset(&after) && after.len() == 101, "ids do not change");
}

/// Lists cut long texts, and a single record is whole.
pub async fn a_quarantined_record_is_kept_unchanged(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    let mut long = poison("orders", 7);
    long.record.key = "k".repeat(5_000);
    long.reason = "r".repeat(5_000);
    store.quarantine("group", &[long.clone()]).await.unwrap();
    let empty = Poison {
        record: Fetched { value: Bytes::new(), headers: Vec::new(), ..poison("orders", 8).record },
        ..long.clone()
    };
    store.quarantine("group", &[empty]).await.unwrap();
    let ids = ids(&*store).await;
    let found = store.get(&ids[0]).await.unwrap().unwrap();
    assert_eq!((&found.value, &found.headers), (&long.record.value, &long.record.headers));
    assert_eq!((&found.row.key, &found.row.reason), (&long.record.key, &long.reason));
    let row = &found.row;
    assert_eq!((row.group.as_str(), row.topic.as_str(), row.partition, row.offset), ("group", "orders", 3, 7));
    assert_eq!((row.size, row.status, row.is_replayable), (7, QuarantineStatus::Quarantined, true));
    assert!((Utc::now() - row.created_at).abs() < TimeDelta::minutes(5) && row.updated_at >= row.created_at);
    let empty = store.get(&ids[1]).await.unwrap().unwrap();
    assert!(empty.value.is_empty() && empty.headers.is_empty() && empty.row.size == 0);

    let listed = store.rows(&[ids[0].clone(), "unknown".to_owned()]).await.unwrap();
    assert!(matches!(&listed[..], [row] if row.key.len() == 256 && row.reason.len() == 1_000), "{listed:?}");
    assert!(store.get("unknown").await.unwrap().is_none());
}

/// A record counts while it waits for an operator.
pub async fn the_quarantine_is_counted_by_group_and_topic(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    assert!(store.counts().await.unwrap().is_empty());
    fill(&*store, "a", "x", 0..3).await;
    fill(&*store, "a", "y", 3..4).await;
    fill(&*store, "b", "x", 4..5).await;
    let ids = ids(&*store).await;
    store.discard(&ids[..1], "not needed").await.unwrap();
    store.claim(&ids[1..2], "claim", LEASE).await.unwrap();
    store.mark_replayed(&ids[1..2], "claim").await.unwrap();
    store.discard(&ids[4..], "not needed").await.unwrap();
    store.claim(&ids[2..4], "claim", LEASE).await.unwrap();
    let count = |group: &str, topic: &str, records| QuarantineCount {
        group: group.to_owned(),
        topic: topic.to_owned(),
        records,
    };
    assert_eq!(store.counts().await.unwrap(), [count("a", "x", 1), count("a", "y", 1), count("b", "x", 0)]);
}

/// Every condition of the filter must hold.
pub async fn the_list_is_filtered_and_newest_first(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    fill(&*store, "a", "x", 0..2).await;
    fill(&*store, "a", "y", 2..4).await;
    fill(&*store, "b", "x", 4..6).await;
    let ids = ids(&*store).await;
    store.discard(&ids[1..3], "not needed").await.unwrap();
    let found = async |filter: QuarantineFilter| {
        let offsets: Vec<String> = rows(&*store, &filter).await.iter().map(|row| row.offset.to_string()).collect();
        offsets.join(" ")
    };
    let all = QuarantineFilter::default;
    let (group, topic) = (|name: &str| Some(name.to_owned()), |name: &str| Some(name.to_owned()));
    assert_eq!(found(all()).await, "5 4 3 2 1 0");
    assert_eq!(found(QuarantineFilter { group: group("a"), ..all() }).await, "3 2 1 0");
    assert_eq!(found(QuarantineFilter { topic: topic("x"), ..all() }).await, "5 4 1 0");
    assert_eq!(found(QuarantineFilter { group: group("a"), topic: topic("x"), ..all() }).await, "1 0");
    assert_eq!(found(QuarantineFilter { group: group("no\0body"), ..all() }).await, "");
    let quarantined = QuarantineFilter { status: Some(QuarantineStatus::Quarantined), ..all() };
    assert_eq!(found(quarantined).await, "5 4 3 0");
    let discarded = QuarantineFilter { status: Some(QuarantineStatus::Discarded), topic: topic("y"), ..all() };
    assert_eq!(found(discarded).await, "2");
    let (hour, now) = (TimeDelta::hours(1), Utc::now());
    assert_eq!(found(QuarantineFilter { from: Some(now - hour), to: Some(now + hour), ..all() }).await, "5 4 3 2 1 0");
    assert_eq!(found(QuarantineFilter { from: Some(now + hour), ..all() }).await, "");
    assert_eq!(found(QuarantineFilter { to: Some(now - hour), ..all() }).await, "");
}

/// Records that come or change between two pages neither repeat nor hide others.
pub async fn a_page_of_the_quarantine_continues_after_its_cursor(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    // Many have the same time.
    let many: Vec<Poison> = (0..10).map(|offset| poison("orders", offset)).collect();
    store.quarantine("group", &many).await.unwrap();
    let first = ids(&*store).await;
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let page = store.list(&QuarantineFilter::default(), cursor.as_ref(), 3).await.unwrap();
        seen.extend(page.items.into_iter().map(|row| row.id));
        let offset = 100 + seen.len() as i64;
        store.quarantine("group", &[poison("orders", offset)]).await.unwrap();
        store.discard(&seen[seen.len() - 1..], "not needed").await.unwrap();
        let Some(next) = page.next else { break };
        cursor = Some(next.to_string().parse().unwrap());
    }
    assert_eq!(seen.len(), 10);
    assert_eq!(seen.iter().collect::<HashSet<_>>(), first.iter().collect());
}

/// A claim that ended by itself does not keep its records.
pub async fn a_claimed_record_is_neither_claimed_again_nor_discarded(harness: &impl QuarantineHarness) {
    let (store, other) = (harness.open_quarantine().await, harness.open_quarantine().await);
    fill(&*store, "group", "orders", 0..3).await;
    let ids = ids(&*store).await;
    let claimed = store.claim(&ids[..2], "first", LEASE).await.unwrap();
    assert_eq!(claimed.len(), 2);
    assert!(claimed.iter().all(|claimed| claimed.value == poison("", 0).record.value && claimed.headers.len() == 2));
    let rest: Vec<String> = other.claim(&ids, "second", LEASE).await.unwrap().into_iter().map(|c| c.row.id).collect();
    assert_eq!(rest, ids[2..]);
    assert!(other.discard(&ids, "not needed").await.unwrap().is_empty());

    store.release(&ids[..1], "second", "not its claim").await.unwrap();
    assert!(store.claim(&ids[..1], "third", LEASE).await.unwrap().is_empty());
    store.release(&ids[..1], "first", "the bus refuses it").await.unwrap();
    assert_eq!(status(&*store, &ids[0]).await, (QuarantineStatus::Quarantined, Some("the bus refuses it".to_owned())));
    assert_eq!(store.claim(&ids[..1], "third", Duration::ZERO).await.unwrap().len(), 1);
    assert_eq!(store.claim(&ids[..1], "fourth", Duration::ZERO).await.unwrap().len(), 1, "the third claim has ended");
    assert_eq!(store.discard(&ids[..1], "not needed").await.unwrap(), ids[..1]);
}

/// A replay whose claim another one has taken over changes nothing.
pub async fn only_the_current_claim_marks_a_record_as_replayed(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    fill(&*store, "group", "orders", 0..2).await;
    let ids = ids(&*store).await;
    assert!(store.mark_replayed(&ids, "first").await.unwrap().is_empty(), "not claimed");
    store.claim(&ids, "first", Duration::ZERO).await.unwrap();
    store.claim(&ids[..1], "second", LEASE).await.unwrap();
    assert_eq!(store.mark_replayed(&ids, "first").await.unwrap(), ids[1..]);
    assert_eq!(store.mark_replayed(&ids, "second").await.unwrap(), ids[..1]);
    assert!(store.claim(&ids, "third", LEASE).await.unwrap().is_empty(), "replayed records are not claimed");
    assert!(store.discard(&ids, "not needed").await.unwrap().is_empty(), "nor discarded");
    assert_eq!(status(&*store, &ids[0]).await, (QuarantineStatus::Replayed, None));
}

/// A record that the bus could not read cannot be published as it was. It can be discarded.
pub async fn a_damaged_record_is_not_claimed(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    let mut damaged = poison("orders", 0);
    damaged.record.damage = Some("its headers are no JSON".to_owned());
    store.quarantine("group", &[damaged]).await.unwrap();
    let ids = ids(&*store).await;
    assert!(!store.get(&ids[0]).await.unwrap().unwrap().row.is_replayable);
    assert!(store.claim(&ids, "claim", LEASE).await.unwrap().is_empty());
    assert_eq!(store.discard(&ids, "damaged").await.unwrap(), ids);
}

/// Also when it is read and quarantined again.
pub async fn a_discarded_record_keeps_its_reason_and_stays_discarded(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    fill(&*store, "group", "orders", 0..1).await;
    let ids = ids(&*store).await;
    assert_eq!(store.discard(&ids, "a test event").await.unwrap(), ids);
    assert!(store.discard(&ids, "again").await.unwrap().is_empty());
    assert!(store.claim(&ids, "claim", LEASE).await.unwrap().is_empty());
    fill(&*store, "group", "orders", 0..1).await;
    assert_eq!(status(&*store, &ids[0]).await, (QuarantineStatus::Discarded, Some("a test event".to_owned())));
    assert_eq!(in_quarantine(&*store).await, 0);
}

/// Those that no operator replayed or discarded are counted by group and topic.
pub async fn expired_records_of_every_status_are_removed(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    fill(&*store, "a", "x", 0..5).await;
    fill(&*store, "a", "y", 5..6).await;
    fill(&*store, "b", "x", 6..8).await;
    let ids = ids(&*store).await;
    store.discard(&ids[..2], "not needed").await.unwrap();
    store.claim(&ids[2..3], "claim", LEASE).await.unwrap();
    store.mark_replayed(&ids[2..3], "claim").await.unwrap();
    assert_eq!(store.remove_expired(LEASE, 10).await.unwrap(), ExpiredRecords::default());

    let mut unhandled: BTreeMap<String, u64> = BTreeMap::new();
    let removed = remove(8, async || {
        let expired = store.remove_expired(Duration::ZERO, 2).await.unwrap();
        for QuarantineCount { group, topic, records } in expired.unhandled {
            *unhandled.entry(format!("{group} {topic}")).or_default() += records;
        }
        expired.removed
    });
    assert!(removed.await.iter().all(|batch| *batch <= 6), "two of each status at once");
    let expected = [("a x", 2), ("a y", 1), ("b x", 2)];
    assert_eq!(unhandled, expected.map(|(names, records)| (names.to_owned(), records)).into());
    assert_eq!((rows(&*store, &QuarantineFilter::default()).await.len(), in_quarantine(&*store).await), (0, 0));
    assert!(store.get(&ids[0]).await.unwrap().is_none());
}

/// Until its claim is released or ends.
pub async fn a_record_that_is_being_replayed_is_not_removed(harness: &impl QuarantineHarness) {
    let store = harness.open_quarantine().await;
    fill(&*store, "group", "orders", 0..3).await;
    let ids = ids(&*store).await;
    assert_eq!(store.claim(&ids[..1], "ended", Duration::ZERO).await.unwrap().len(), 1);
    assert_eq!(store.claim(&ids[1..2], "claim", LEASE).await.unwrap().len(), 1);
    remove(2, async || store.remove_expired(Duration::ZERO, 10).await.unwrap().removed).await;
    assert_eq!(self::ids(&*store).await, ids[1..2]);
    store.release(&ids[1..2], "claim", "the bus refuses it").await.unwrap();
    remove(1, async || store.remove_expired(Duration::ZERO, 10).await.unwrap().removed).await;
}

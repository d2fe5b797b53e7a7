//! The laws of [`AuditStore`].

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use posthaste_core::hub_store::{AuditEntry, AuditFilter, AuditPageRequest, AuditStore, LogType};

use super::{HubHarness, options, remove};

fn begin() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(1_750_000_000_123_456).unwrap()
}

/// An entry with this number as its id and as the seconds of its time.
fn entry(number: u32, log_type: LogType) -> AuditEntry {
    let id = format!("0190d0c0-1111-7abc-8def-{number:012x}");
    AuditEntry::new(id, begin() + TimeDelta::seconds(number.into()), log_type)
}

async fn append(audit: &Arc<dyn AuditStore>, entries: &[AuditEntry]) {
    audit.append(Arc::new(entries.to_vec())).await.unwrap();
}

/// The numbers of the entries that meet the filter.
async fn numbers(audit: &Arc<dyn AuditStore>, filter: &AuditFilter) -> Vec<u32> {
    let page = audit.list(filter, &AuditPageRequest::default()).await.unwrap();
    assert_eq!((page.items.len() as u64, page.total_is_lower_bound, page.next), (page.total, false, None));
    page.items.iter().map(number).collect()
}

fn number(entry: &AuditEntry) -> u32 {
    u32::from_str_radix(&entry.id[24..], 16).unwrap()
}

/// All fields, and entries of every type.
pub async fn entries_are_kept_unchanged(harness: &impl HubHarness) {
    let audit = harness.open(options()).await.audit;
    let mut full = entry(1, LogType::DeliveryFailed)
        .event("event 1", "order.placed")
        .subscription("subscription", "subscriber")
        .domain("organization")
        .topic("posthaste.outbox.organization")
        .attempt(3)
        .error_code("503")
        .message("a \"message\" with ünïcode and a \0");
    (full.status_code, full.duration) = (Some(503), Some(Duration::from_millis(1_234)));
    let empty = entry(2, LogType::ChannelPaused);
    append(&audit, &[]).await;
    append(&audit, &[full.clone(), empty.clone()]).await;
    let page = audit.list(&AuditFilter::default(), &AuditPageRequest::default()).await.unwrap();
    assert_eq!(page.items, [empty, full]);
    // More than one statement inserts at once, and every type.
    let many: Vec<AuditEntry> =
        (10..1_210).map(|number| entry(number, LogType::ALL[number as usize % LogType::ALL.len()])).collect();
    append(&audit, &many).await;
    let request = AuditPageRequest { size: 500, page: 2, ..AuditPageRequest::default() };
    let page = audit.list(&AuditFilter::default(), &request).await.unwrap();
    assert_eq!((page.total, page.items.len()), (1_202, 202));
    assert_eq!(page.items[0], many[199]);
}

/// By one process or by two.
pub async fn an_entry_is_kept_once(harness: &impl HubHarness) {
    let (one, other) = (harness.open(options()).await.audit, harness.open(options()).await.audit);
    let received = entry(1, LogType::Received).event("a", "t");
    let dead = entry(2, LogType::DeadLettered).event("a", "t");
    append(&one, &[received.clone(), dead.clone()]).await;
    let later = AuditEntry { at: received.at + TimeDelta::seconds(60), ..received.clone() };
    append(&other, &[later, dead.clone(), entry(3, LogType::Executed).event("a", "t")]).await;
    let trail = one.trail("a", 10).await.unwrap();
    assert_eq!(trail.iter().map(number).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(trail[0], received, "the first stays");
    // Processes that append the same entries at the same time, in any order.
    let entries: Vec<AuditEntry> = (10..200).map(|number| entry(number, LogType::Received).event("b", "t")).collect();
    let reversed: Vec<AuditEntry> = entries.iter().rev().cloned().collect();
    tokio::join!(append(&one, &entries), append(&other, &reversed));
    assert_eq!(one.trail("b", 1_000).await.unwrap(), entries);
}

/// Every filter alone, and together with others.
pub async fn audit_lists_are_filtered_and_newest_first(harness: &impl HubHarness) {
    let audit = harness.open(options()).await.audit;
    let with_status = |entry: AuditEntry, status: u16| AuditEntry { status_code: Some(status), ..entry };
    append(
        &audit,
        &[
            entry(1, LogType::Received).event("a", "t"),
            entry(2, LogType::Routed).event("a", "t").subscription("s", "x"),
            with_status(entry(3, LogType::DeliveryFailed).event("a", "t").subscription("s", "x"), 503),
            with_status(entry(4, LogType::Executed).event("a", "t").subscription("s", "x"), 200),
            with_status(entry(5, LogType::Executed).event("b", "t").subscription("r", "x"), 204),
            with_status(entry(6, LogType::DeliveryFailed).event("b", "t").subscription("s", "x"), 404),
            entry(7, LogType::DeadLettered).event("b", "t").subscription("s", "x"),
            entry(8, LogType::ChannelPaused),
            entry(9, LogType::SubscriptionChanged).subscription("s", "x"),
        ],
    )
    .await;
    let text = |text: &str| Some(text.to_owned());
    let (all, time) = (AuditFilter::default, |number: i64| Some(begin() + TimeDelta::seconds(number)));
    for (filter, expected) in [
        (all(), &[9, 8, 7, 6, 5, 4, 3, 2, 1][..]),
        (AuditFilter { event_id: text("a"), ..all() }, &[4, 3, 2, 1]),
        (AuditFilter { event_id: text("b"), subscription_id: text("s"), ..all() }, &[7, 6]),
        (AuditFilter { event_id: text("a"), log_types: vec![LogType::Executed], ..all() }, &[4]),
        (AuditFilter { subscription_id: text("s"), ..all() }, &[9, 7, 6, 4, 3, 2]),
        (AuditFilter { subscription_id: text("s"), log_types: LogType::DELIVERIES.into(), ..all() }, &[7, 6, 4, 3]),
        (AuditFilter { log_types: LogType::DELIVERIES.into(), ..all() }, &[7, 6, 5, 4, 3]),
        (AuditFilter { log_types: vec![LogType::ChannelPaused], ..all() }, &[8]),
        (AuditFilter { log_types: vec![LogType::TopicReset], ..all() }, &[]),
        (AuditFilter { status_code: Some(200), ..all() }, &[4]),
        (AuditFilter { status_code: Some(204), ..all() }, &[5]),
        (AuditFilter { status_code: Some(404), ..all() }, &[6]),
        (AuditFilter { status_code: Some(503), subscription_id: text("s"), ..all() }, &[3]),
        (AuditFilter { status_code: Some(503), subscription_id: text("r"), ..all() }, &[]),
        (AuditFilter { status_code: Some(503), log_types: vec![LogType::DeadLettered], ..all() }, &[]),
        (AuditFilter { from: time(3), to: time(5), ..all() }, &[5, 4, 3]),
        (AuditFilter { from: time(4), event_id: text("a"), ..all() }, &[4]),
        (AuditFilter { to: time(6), subscription_id: text("s"), ..all() }, &[6, 4, 3, 2]),
        (AuditFilter { event_id: text("\0"), ..all() }, &[]),
        (AuditFilter { subscription_id: text("\0"), ..all() }, &[]),
    ] {
        assert_eq!(numbers(&audit, &filter).await, expected, "{filter:?}");
    }
}

/// Pages by cursor and by number show each entry once, in order.
pub async fn a_page_of_the_audit_continues_after_its_cursor(harness: &impl HubHarness) {
    let audit = harness.open(options()).await.audit;
    let types = [LogType::Executed, LogType::DeliveryFailed, LogType::DeadLettered, LogType::Published];
    let entries: Vec<AuditEntry> = (1..=40)
        .map(|number| AuditEntry {
            // Several at the same time: their ids have the order.
            at: begin() + TimeDelta::seconds(i64::from(number / 3)),
            ..entry(number, types[number as usize % 4]).event("a", "t").subscription("s", "x")
        })
        .collect();
    append(&audit, &entries).await;
    let deliveries = || LogType::DELIVERIES.to_vec();
    for filter in [
        AuditFilter::default(),
        AuditFilter { log_types: deliveries(), ..AuditFilter::default() },
        AuditFilter { event_id: Some("a".to_owned()), ..AuditFilter::default() },
        AuditFilter { subscription_id: Some("s".to_owned()), log_types: deliveries(), ..AuditFilter::default() },
    ] {
        let is_listed = |entry: &&AuditEntry| filter.log_types.is_empty() || filter.log_types.contains(&entry.log_type);
        let expected: Vec<u32> = entries.iter().filter(is_listed).map(number).rev().collect();
        let (mut by_cursor, mut by_page, mut cursor) = (Vec::new(), Vec::new(), None);
        for page in 0.. {
            let request = AuditPageRequest { cursor: cursor.clone(), page: 0, size: 7 };
            let found = audit.list(&filter, &request).await.unwrap();
            assert_eq!(found.total, expected.len() as u64);
            by_cursor.extend(found.items.iter().map(number));
            let request = AuditPageRequest { cursor: None, page, size: 7 };
            by_page.extend(audit.list(&filter, &request).await.unwrap().items.iter().map(number));
            cursor = found.next;
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(by_cursor, expected, "{filter:?}");
        assert_eq!(by_page, expected, "{filter:?}");
    }
}

/// Whatever the order of the appends.
pub async fn the_trail_of_an_event_is_oldest_first(harness: &impl HubHarness) {
    let audit = harness.open(options()).await.audit;
    let entries: Vec<AuditEntry> =
        (1..=5).map(|number| entry(number, LogType::DeliveryFailed).event("a", "t")).collect();
    let reversed: Vec<AuditEntry> = entries.iter().rev().cloned().collect();
    append(&audit, &reversed).await;
    append(&audit, &[entry(9, LogType::Received).event("b", "t")]).await;
    assert_eq!(audit.trail("a", 10).await.unwrap(), entries);
    assert_eq!(audit.trail("a", 2).await.unwrap(), entries[..2]);
    assert!(audit.trail("c", 10).await.unwrap().is_empty() && audit.trail("\0", 10).await.unwrap().is_empty());
}

/// In batches, and each by one process only.
pub async fn expired_audit_entries_are_removed_oldest_first(harness: &impl HubHarness) {
    let (one, other) = (harness.open(options()).await.audit, harness.open(options()).await.audit);
    let old: Vec<AuditEntry> = (1..=25).map(|number| entry(number, LogType::Received).event("a", "t")).collect();
    let new = AuditEntry { at: Utc::now(), ..entry(99, LogType::Executed).event("a", "t") };
    append(&one, &old).await;
    append(&one, std::slice::from_ref(&new)).await;
    let day = Duration::from_secs(24 * 60 * 60);
    assert_eq!(one.remove_expired(day, 10).await.unwrap(), 10);
    assert_eq!(number(&one.trail("a", 100).await.unwrap()[0]), 11, "the oldest first");
    let (first, second) = tokio::join!(one.remove_expired(day, 10), other.remove_expired(day, 10));
    let removed = first.unwrap() + second.unwrap();
    assert!(removed <= 15, "each is removed once");
    remove(15 - removed, async || one.remove_expired(day, 10).await.unwrap()).await;
    assert_eq!(one.trail("a", 100).await.unwrap().iter().map(number).collect::<Vec<_>>(), [99]);
}

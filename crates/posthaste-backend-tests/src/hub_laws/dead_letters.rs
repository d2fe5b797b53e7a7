//! The laws of [`DeadLetterStore`].

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use posthaste_core::hub_store::{
    DeadLetter, DeadLetterDetail, DeadLetterFields, DeadLetterFilter, DeadLetterSort, DeadLetterSortKey,
    DeadLetterSource, DeadLetterStatus, DeadLetterStore, NewDeadLetter, ReplayResult, Trigger,
};
use posthaste_core::{Claimed, Disposition, Failure, Settled, Settlement, Source};

use super::{HubHarness, LEASE, options, remove};
use crate::source_laws::SourceHarness;

/// A [`DeadLetterSource`] on the dead letters of a hub, for the laws of [`Source`].
pub struct DeadLetterHarness<H> {
    harness: H,
    lease: Duration,
    writer: DeadLetterSource,
}

impl<H: HubHarness> DeadLetterHarness<H> {
    /// A fresh database whose sources have this lease.
    pub async fn start(lease: Duration) -> Self {
        let harness = H::start().await;
        let writer = DeadLetterSource::new(harness.open(options()).await.dead_letters, lease);
        Self { harness, lease, writer }
    }
}

#[async_trait]
impl<H: HubHarness + 'static> SourceHarness for DeadLetterHarness<H> {
    type Source = DeadLetterSource;

    async fn open(&self) -> DeadLetterSource {
        DeadLetterSource::new(self.harness.open(options()).await.dead_letters, self.lease)
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let letter = NewDeadLetter { first_delay: Some(delay), ..dead_letter(label) };
        self.writer.insert(vec![letter]).await.unwrap();
    }

    fn label(&self, item: &DeadLetter) -> String {
        item.fields.event_id.trim_start_matches("event-").to_owned()
    }
}

/// A dead letter that is due at once, of the event `event-{delivery_id}`.
pub fn dead_letter(delivery_id: &str) -> NewDeadLetter {
    NewDeadLetter {
        fields: DeadLetterFields {
            delivery_id: delivery_id.to_owned(),
            event_id: format!("event-{delivery_id}"),
            subscription_id: "subscription".to_owned(),
            subscriber_id: "billing".to_owned(),
            event_type: "order.placed".to_owned(),
            domain: "organization".to_owned(),
            endpoint: "https://billing.example/hook".to_owned(),
            attempts: 4,
            first_failed_at: DateTime::from_timestamp_millis(1_750_000_000_000).unwrap(),
        },
        envelope: Bytes::from_static(b"\x00envelope"),
        readable: format!("{{\"delivery\":\"{delivery_id}\"}}"),
        error: "HTTP 503 from the endpoint".to_owned(),
        error_code: "503".to_owned(),
        error_cause: None,
        is_deferred: false,
        is_permanent: false,
        first_delay: Some(Duration::ZERO),
    }
}

async fn open(harness: &impl HubHarness) -> (Arc<dyn DeadLetterStore>, DeadLetterSource) {
    let store = harness.open(options()).await.dead_letters;
    (store.clone(), DeadLetterSource::new(store, LEASE))
}

async fn one(source: &DeadLetterSource) -> Claimed<DeadLetter> {
    let mut items = source.claim(10).await.unwrap().items;
    assert_eq!(items.len(), 1);
    items.remove(0)
}

async fn detail(store: &Arc<dyn DeadLetterStore>, id: &str) -> DeadLetterDetail {
    store.get(id).await.unwrap().unwrap()
}

async fn settle(source: &DeadLetterSource, claimed: &Claimed<DeadLetter>, disposition: Disposition) -> Settled {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(12) };
    source.settle(&[settlement]).await.unwrap()[0]
}

fn failure() -> Failure {
    Failure::transient("500", "broken").cause("a null somewhere")
}

fn retry(after: Duration, counted: bool) -> Disposition {
    Disposition::Retry { after, counted, failure: Some(failure()) }
}

/// Inserting the same delivery again changes nothing. Claims are in the order of insertion.
pub async fn a_delivery_is_inserted_once(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    let many: Vec<NewDeadLetter> = (0..150).map(|number| dead_letter(&number.to_string())).collect();
    source.insert(many.clone()).await.unwrap();
    source.insert(many).await.unwrap();
    source.insert(Vec::new()).await.unwrap();
    assert_eq!(store.depth_by_status().await.unwrap()[0], (DeadLetterStatus::New, 150));
    assert!(store.is_due().await.unwrap() && store.oldest_due().await.unwrap().is_some());
    let items = source.claim(200).await.unwrap().items;
    let order: Vec<String> = items.iter().map(|claimed| claimed.item.fields.event_id.clone()).collect();
    assert_eq!(order, (0..150).map(|number| format!("event-{number}")).collect::<Vec<_>>());
    assert!(items.is_sorted_by_key(|claimed| &claimed.item.id), "ids rise in the order of insertion");
    let first = &items[0].item;
    assert_eq!((&first.envelope, &first.fields), (&dead_letter("0").envelope, &dead_letter("0").fields));
    assert_eq!((items[0].attempt, items[0].budget), (1, None));
    assert!(!store.is_due().await.unwrap(), "all are leased");
}

/// However many dead letters one subscription has, those of the others are found and claimed.
pub async fn each_subscription_is_claimed_by_itself(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    let of = |subscription: &str, number: usize| {
        let mut letter = dead_letter(&format!("{subscription}-{number}"));
        letter.fields.subscription_id = subscription.to_owned();
        letter
    };
    source.insert((0..100).map(|number| of("busy", number)).collect()).await.unwrap();
    source.insert((0..3).map(|number| of("calm", number)).collect()).await.unwrap();
    source.insert(vec![NewDeadLetter { first_delay: Some(LEASE), ..of("later", 0) }]).await.unwrap();
    let waiting = store.waiting(Vec::new()).await.unwrap();
    let ids: Vec<&str> = waiting.iter().map(|waiting| waiting.subscription_id.as_str()).collect();
    assert_eq!(ids, ["busy", "calm", "later"]);
    assert_eq!(waiting.iter().map(|waiting| waiting.due_in.is_zero()).collect::<Vec<_>>(), [true, true, false]);

    let items = source.claim(10).await.unwrap().items;
    let claimed = |subscription: &str| -> Vec<String> {
        let of_it = items.iter().filter(|claimed| claimed.item.fields.subscription_id == subscription);
        of_it.map(|claimed| claimed.item.fields.delivery_id.clone()).collect()
    };
    assert_eq!(claimed("busy"), ["busy-0", "busy-1", "busy-2", "busy-3", "busy-4"], "its earliest");
    assert_eq!(claimed("calm"), ["calm-0", "calm-1", "calm-2"]);
    let leased = items.iter().map(|claimed| claimed.item.id.clone()).collect();
    let waiting = store.waiting(leased).await.unwrap();
    let ids: Vec<&str> = waiting.iter().map(|waiting| waiting.subscription_id.as_str()).collect();
    assert_eq!(ids, ["busy", "later"]);
}

/// Attempts that were made count and are in the history; an attempt that was not made leaves no trace.
pub async fn scheduled_retries_count_and_leave_a_history(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    source.insert(vec![dead_letter("1")]).await.unwrap();
    let claimed = one(&source).await;
    let id = claimed.item.id.clone();
    let before = detail(&store, &id).await.row;
    assert_eq!(settle(&source, &claimed, retry(Duration::ZERO, false)).await, Settled::Applied);
    let waiting = detail(&store, &id).await;
    assert_eq!((waiting.row.status, waiting.row.fields.attempts), (DeadLetterStatus::New, 4));
    assert!(waiting.history.is_empty());
    assert_eq!((waiting.row.updated_at, waiting.row.error), (before.updated_at, before.error));

    assert_eq!(settle(&source, &one(&source).await, retry(Duration::ZERO, true)).await, Settled::Applied);
    let failed = detail(&store, &id).await.row;
    assert_eq!((failed.status, failed.retry_count, failed.fields.attempts), (DeadLetterStatus::Failed, 1, 5));
    assert_eq!(
        (&*failed.error, &*failed.error_code, failed.error_cause.as_deref()),
        ("broken", "500", Some("a null somewhere"))
    );
    assert!(failed.scheduled_at.is_some());

    let claimed = one(&source).await;
    assert_eq!((claimed.attempt, claimed.item.fields.attempts), (2, 5));
    assert_eq!(settle(&source, &claimed, Disposition::Dead(failure())).await, Settled::Applied);
    let spent = detail(&store, &id).await;
    assert_eq!((spent.row.status, spent.row.retry_count, spent.row.fields.attempts), (DeadLetterStatus::Failed, 2, 6));
    assert_eq!((spent.row.scheduled_at, spent.history.len()), (None, 2));
    let last = &spent.history[1];
    assert_eq!((last.error_code.as_deref(), last.duration), (Some("500"), Duration::from_millis(12)));
    assert_eq!(last.trigger, Trigger::Scheduled);
    assert_eq!(source.claim(10).await.unwrap().next_due, None);
}

/// A replay is one attempt, and does not change the schedule.
pub async fn a_replay_is_one_attempt_beside_the_schedule(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    source.insert(vec![NewDeadLetter { first_delay: Some(LEASE), ..dead_letter("1") }]).await.unwrap();
    let id = store.of_event("event-1").await.unwrap()[0].id.clone();
    let replay = source.replay(vec![id.clone(), "unknown".to_owned()], Some("fixed".to_owned())).await.unwrap();
    assert_eq!(replay.matched, 1);
    assert_eq!(source.replay(vec![id.clone()], None).await.unwrap().matched, 0, "it already waits for a replay");
    assert_eq!(store.replay_results(&replay.id).await.unwrap().pending, 1);

    let claimed = one(&source).await;
    assert_eq!((claimed.attempt, claimed.budget), (1, Some(1)));
    assert_eq!(claimed.item.trigger, Trigger::Replay { replay_id: replay.id.clone() });
    assert_eq!(settle(&source, &claimed, retry(Duration::ZERO, false)).await, Settled::Applied);
    assert_eq!(settle(&source, &one(&source).await, Disposition::Dead(failure())).await, Settled::Applied);
    let failed = detail(&store, &id).await;
    assert_eq!((failed.row.retry_count, failed.row.fields.attempts), (0, 5));
    assert_eq!(failed.row.status, DeadLetterStatus::Failed);
    assert!(failed.row.scheduled_at.is_some(), "its schedule is kept");
    assert_eq!((failed.row.replay_id, failed.history.len()), (None, 1));
    let results = store.replay_results(&replay.id).await.unwrap();
    let error_code = Some("500".to_owned());
    let failed = ReplayResult { dead_letter_id: id.clone(), status: DeadLetterStatus::Failed, error_code };
    assert_eq!((results.pending, results.results), (0, vec![failed]));

    let again = source.replay(vec![id.clone()], None).await.unwrap();
    assert_eq!(settle(&source, &one(&source).await, Disposition::Done).await, Settled::Applied);
    let done = detail(&store, &id).await;
    assert_eq!((done.row.status, done.row.retry_count, done.row.scheduled_at), (DeadLetterStatus::Processed, 0, None));
    assert_eq!((done.history.len(), done.history[1].error_code.as_deref()), (2, None));
    assert_eq!(store.replay_results(&again.id).await.unwrap().results[0].status, DeadLetterStatus::Processed);
    assert_eq!(source.replay(vec![id], None).await.unwrap().matched, 0, "it was delivered");
    assert_eq!(store.replay_results("unknown").await.unwrap(), Default::default());
}

/// The success of a scheduled retry is the result of a replay that was requested while the retry was in flight.
pub async fn a_scheduled_success_completes_a_replay_requested_meanwhile(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    source.insert(vec![dead_letter("1")]).await.unwrap();
    let claimed = one(&source).await;
    let replay = source.replay(vec![claimed.item.id.clone()], None).await.unwrap();
    assert!(source.claim(10).await.unwrap().items.is_empty(), "it is in flight");
    assert_eq!(settle(&source, &claimed, Disposition::Done).await, Settled::Applied);
    let results = store.replay_results(&replay.id).await.unwrap();
    assert_eq!((results.pending, results.results[0].status), (0, DeadLetterStatus::Processed));
    assert_eq!(detail(&store, &claimed.item.id).await.history[0].trigger, Trigger::Scheduled);
}

/// A process that closes its source releases its own claims and no others.
pub async fn closing_releases_the_claims_of_this_owner_only(harness: &impl HubHarness) {
    let (store, one_owner) = open(harness).await;
    let other = DeadLetterSource::new(store, LEASE);
    one_owner.insert(vec![dead_letter("1"), dead_letter("2")]).await.unwrap();
    let ours = one_owner.claim(1).await.unwrap().items;
    let theirs = other.claim(1).await.unwrap().items;
    one_owner.close().await.unwrap();
    assert_eq!(other.claim(10).await.unwrap().items[0].item.id, ours[0].item.id);
    assert!(one_owner.claim(10).await.unwrap().items.is_empty(), "only its own");
    assert_eq!(settle(&other, &theirs[0], Disposition::Done).await, Settled::Applied);
}

/// Settle, renew and release with a lost claim do not change the next claim.
pub async fn a_settlement_of_an_earlier_claim_changes_nothing(harness: &impl HubHarness) {
    let (store, crashed) = open(harness).await;
    let next = DeadLetterSource::new(store.clone(), LEASE);
    crashed.insert(vec![dead_letter("1")]).await.unwrap();
    let lost = one(&crashed).await;
    store.release_all(&lost.item.claim_id.owner).await.unwrap();
    let claimed = one(&next).await;
    assert_eq!(crashed.renew(&[&lost]).await.unwrap(), [Settled::LostLease]);
    assert_eq!(settle(&crashed, &lost, Disposition::Done).await, Settled::LostLease);
    crashed.release(&[&lost]).await.unwrap();
    let untouched = detail(&store, &claimed.item.id).await;
    assert_eq!((untouched.row.status, untouched.history.len()), (DeadLetterStatus::New, 0));
    assert!(crashed.claim(10).await.unwrap().items.is_empty(), "it is still leased");
    assert_eq!(next.renew(&[&claimed]).await.unwrap(), [Settled::Applied]);
    assert_eq!(settle(&next, &claimed, Disposition::Done).await, Settled::Applied);
}

/// An operator finds it where failed dead letters are listed, and can replay it once its cause is gone.
pub async fn a_permanent_failure_is_inserted_as_failed(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    let permanent = NewDeadLetter { is_permanent: true, first_delay: None, ..dead_letter("1") };
    source.insert(vec![permanent, dead_letter("2")]).await.unwrap();
    let failed = DeadLetterFilter { status: Some(DeadLetterStatus::Failed), ..DeadLetterFilter::default() };
    let page = store.list(&failed).await.unwrap();
    let [row] = &page.items[..] else { panic!("one is failed: {:?}", page.items) };
    assert_eq!((row.fields.delivery_id.as_str(), row.retry_count, row.scheduled_at), ("1", 0, None));
    let depth = store.depth_by_status().await.unwrap();
    assert!(depth.contains(&(DeadLetterStatus::Failed, 1)) && depth.contains(&(DeadLetterStatus::New, 1)), "{depth:?}");
    let due = one(&source).await;
    assert_eq!(due.item.fields.delivery_id, "2", "the other one is scheduled");
    source.replay(vec![row.id.clone()], None).await.unwrap();
    let replayed = one(&source).await;
    assert_eq!(replayed.item.fields.delivery_id, "1");
    assert_eq!(settle(&source, &replayed, Disposition::Done).await, Settled::Applied);
    assert_eq!(detail(&store, &row.id).await.row.status, DeadLetterStatus::Processed);
}

/// The first attempt of a deferred delivery is not a retry, so it stays scheduled even with a limit of 0 retries.
pub async fn schedules_end_where_the_limit_was_lowered(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    let deferred = NewDeadLetter { is_deferred: true, ..dead_letter("deferred") };
    source.insert(vec![dead_letter("tried"), deferred]).await.unwrap();
    store.end_schedules(1).await.unwrap();
    assert!(store.of_event("event-tried").await.unwrap()[0].scheduled_at.is_some(), "it has a retry left");
    store.end_schedules(0).await.unwrap();
    assert!(store.of_event("event-tried").await.unwrap()[0].scheduled_at.is_none());
    assert_eq!(one(&source).await.item.fields.event_id, "event-deferred");
}

/// Tests every condition of a filter, and every order.
pub async fn lists_are_filtered_and_sorted(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    let mut special = dead_letter("special");
    special.fields.subscriber_id = "Audit_Team".to_owned();
    special.fields.domain = "user-lifecycle".to_owned();
    special.fields.event_type = "user.created".to_owned();
    special.error = "100% BROKEN_pipe".to_owned();
    special.readable = "{\"note\":\"Needle\"}".to_owned();
    let later = NewDeadLetter { first_delay: Some(LEASE), ..dead_letter("1") };
    let latest = NewDeadLetter { first_delay: Some(LEASE), ..dead_letter("4") };
    special.first_delay = Some(LEASE);
    source.insert(vec![later, dead_letter("2"), special, latest]).await.unwrap();
    // The clock of the database has to move before the update.
    tokio::time::sleep(Duration::from_millis(5)).await;
    settle(&source, &one(&source).await, retry(LEASE, true)).await;

    let found = async |filter: DeadLetterFilter| {
        let page = store.list(&filter).await.unwrap();
        assert!(!page.total_is_lower_bound);
        let items: Vec<String> = page.items.iter().map(|row| row.fields.delivery_id.clone()).collect();
        (items.join(" "), page.total)
    };
    let text = |text: &str| Some(text.to_owned());
    let any = DeadLetterFilter::default;
    assert_eq!(found(any()).await, ("4 special 2 1".to_owned(), 4));
    let sorted = |by, descending| DeadLetterFilter { sort: DeadLetterSort { by, descending }, ..any() };
    assert_eq!(found(sorted(DeadLetterSortKey::CreatedAt, false)).await.0, "1 2 special 4");
    assert_eq!(found(sorted(DeadLetterSortKey::RetryCount, true)).await.0, "2 4 special 1");
    assert_eq!(found(sorted(DeadLetterSortKey::UpdatedAt, false)).await.0, "1 special 4 2");
    assert_eq!(found(DeadLetterFilter { page: 1, size: 3, ..any() }).await, ("1".to_owned(), 4));
    assert_eq!(found(DeadLetterFilter { message_id: text("event-2"), ..any() }).await, ("2".to_owned(), 1));
    assert_eq!(found(DeadLetterFilter { status: Some(DeadLetterStatus::Failed), ..any() }).await.0, "2");
    for filter in [
        DeadLetterFilter { subscriber_id: text("Audit_Team"), ..any() },
        DeadLetterFilter { domain: text("user-lifecycle"), ..any() },
        DeadLetterFilter { event_type: text("user.created"), ..any() },
        DeadLetterFilter { error: text("broken_PIPE"), ..any() },
        DeadLetterFilter { error: text("0%"), ..any() },
        DeadLetterFilter { q: text("audit_t"), ..any() },
        DeadLetterFilter { q: text("EVENT-spec"), ..any() },
        DeadLetterFilter { q: text("% broken"), ..any() },
    ] {
        assert_eq!(found(filter.clone()).await, ("special".to_owned(), 1), "{filter:?}");
    }
    for filter in [
        DeadLetterFilter { error: text("b%n"), ..any() },
        DeadLetterFilter { error: text("10_"), ..any() },
        DeadLetterFilter { q: text("team"), ..any() },
        DeadLetterFilter { q: text("needle"), ..any() },
        DeadLetterFilter { message_id: text("' OR 1=1 --"), ..any() },
    ] {
        assert_eq!(found(filter.clone()).await, (String::new(), 0), "{filter:?}");
    }
    let now = Utc::now();
    let span = |from: i64, to: i64| DeadLetterFilter {
        from: Some(now + TimeDelta::hours(from)),
        to: Some(now + TimeDelta::hours(to)),
        ..any()
    };
    assert_eq!((found(span(-23, 1)).await.1, found(span(1, 2)).await.1, found(span(-2, -1)).await.1), (4, 0, 0));
    assert_eq!(found(DeadLetterFilter { q: text("needle"), ..span(-23, 1) }).await.0, "special");
    assert_eq!(found(DeadLetterFilter { q: text("needle"), ..span(-24, 1) }).await.1, 0, "too wide to search payloads");
    assert!(store.get("unknown").await.unwrap().is_none());
}

/// Pages by cursor show every dead letter once, also when others are inserted meanwhile.
pub async fn a_cursor_continues_where_the_page_ended(harness: &impl HubHarness) {
    let (store, _) = open(harness).await;
    let ids = |range: std::ops::Range<u32>| range.map(|number| dead_letter(&number.to_string())).collect::<Vec<_>>();
    store.insert(ids(0..7)).await.unwrap();
    let sort = DeadLetterSort { by: DeadLetterSortKey::CreatedAt, descending: true };
    let (mut shown, mut cursor) = (Vec::new(), None);
    loop {
        let page =
            store.list(&DeadLetterFilter { sort, cursor, size: 3, ..DeadLetterFilter::default() }).await.unwrap();
        shown.extend(page.items.into_iter().map(|row| row.fields.delivery_id));
        store.insert(ids(7..9)).await.unwrap();
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(shown, ["6", "5", "4", "3", "2", "1", "0"]);
}

/// NEW and FAILED dead letters are kept, and so are young ones.
pub async fn processed_dead_letters_are_removed_with_their_history(harness: &impl HubHarness) {
    let (store, source) = open(harness).await;
    source.insert(["a", "b", "c", "failed"].map(dead_letter).into()).await.unwrap();
    let claimed = source.claim(10).await.unwrap().items;
    settle(&source, &claimed[3], retry(LEASE, true)).await;
    for claimed in &claimed[..3] {
        settle(&source, claimed, retry(Duration::ZERO, true)).await;
    }
    for claimed in &source.claim(10).await.unwrap().items {
        assert_eq!(settle(&source, claimed, Disposition::Done).await, Settled::Applied);
    }
    source.insert(vec![NewDeadLetter { first_delay: None, ..dead_letter("new") }]).await.unwrap();
    assert_eq!(detail(&store, &claimed[0].item.id).await.history.len(), 2);

    assert_eq!(store.remove_processed(LEASE, 10).await.unwrap(), 0);
    let removed = remove(3, async || store.remove_processed(Duration::ZERO, 2).await.unwrap()).await;
    assert!(removed.iter().all(|batch| *batch <= 2), "{removed:?}");
    assert!(store.get(&claimed[0].item.id).await.unwrap().is_none());
    assert_eq!(detail(&store, &claimed[3].item.id).await.history.len(), 1);
    let depths = store.depth_by_status().await.unwrap();
    let depth_of = |status| depths.iter().find(|(other, _)| *other == status).map(|(_, depth)| *depth);
    use DeadLetterStatus::{Failed, New, Processed};
    assert_eq!([New, Failed, Processed].map(|status| depth_of(status).unwrap_or_default()), [1, 1, 0]);
}

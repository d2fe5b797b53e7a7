use std::time::Duration;

use chrono::{TimeDelta, Utc};
use posthaste_core::{Claimed, Disposition, Failure, Settled, Source};
use posthaste_sql::letters::{
    Letter, LetterDetail, LetterFilter, LetterSort, LetterSortKey, LetterStatus, NewLetter, ReplayResult, Trigger,
};
use posthaste_sql::sqlite::{Database, Letters};

use crate::support::{File, LEASE, execute, letter, settle};

async fn letters(file: &File) -> (Database, Letters) {
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    (database.clone(), Letters::new(database, LEASE))
}

async fn one(letters: &Letters) -> Claimed<Letter> {
    let mut items = letters.claim(10).await.unwrap().items;
    assert_eq!(items.len(), 1);
    items.remove(0)
}

async fn detail(letters: &Letters, id: &str) -> LetterDetail {
    letters.get(id).await.unwrap().unwrap()
}

fn failure() -> Failure {
    Failure::transient("500", "broken").cause("a null somewhere")
}

fn retry(after: Duration, counted: bool) -> Disposition {
    Disposition::Retry { after, counted, failure: Some(failure()) }
}

#[tokio::test]
async fn a_delivery_is_taken_in_once() {
    let file = File::new();
    let (_, letters) = letters(&file).await;
    let many: Vec<NewLetter> = (0..150).map(|number| letter(&number.to_string())).collect();
    letters.intake(many.clone()).await.unwrap();
    letters.intake(many).await.unwrap();
    letters.intake(Vec::new()).await.unwrap();
    assert_eq!(letters.depth_by_status().await.unwrap()[0], (LetterStatus::New, 150));
    let items = letters.claim(200).await.unwrap().items;
    let order: Vec<String> = items.iter().map(|claimed| claimed.item.event_id.clone()).collect();
    assert_eq!(order, (0..150).map(|number| format!("event-{number}")).collect::<Vec<_>>());
    assert_eq!(items[0].item.envelope, letter("0").envelope);
    assert_eq!((items[0].attempt, items[0].budget, items[0].item.attempts), (1, None, 4));
}

#[tokio::test]
async fn scheduled_retries_count_and_leave_a_history() {
    let file = File::new();
    let (_, letters) = letters(&file).await;
    letters.intake(vec![letter("1")]).await.unwrap();
    let claimed = one(&letters).await;
    let id = claimed.item.id.clone();
    let before = detail(&letters, &id).await.letter;
    assert_eq!(settle(&letters, &claimed, retry(Duration::ZERO, false)).await, Settled::Applied);
    let waiting = detail(&letters, &id).await;
    assert_eq!((waiting.letter.status, waiting.letter.attempts, waiting.history.len()), (LetterStatus::New, 4, 0));
    assert_eq!((waiting.letter.updated_at, waiting.letter.error), (before.updated_at, before.error));

    assert_eq!(settle(&letters, &one(&letters).await, retry(Duration::ZERO, true)).await, Settled::Applied);
    let failed = detail(&letters, &id).await.letter;
    assert_eq!((failed.status, failed.retry_count, failed.attempts), (LetterStatus::Failed, 1, 5));
    assert_eq!(
        (&*failed.error, &*failed.error_code, failed.error_cause.as_deref()),
        ("broken", "500", Some("a null somewhere"))
    );
    assert!(failed.scheduled_at.is_some());

    let claimed = one(&letters).await;
    assert_eq!((claimed.attempt, claimed.item.attempts), (2, 5));
    assert_eq!(settle(&letters, &claimed, Disposition::Dead(failure())).await, Settled::Applied);
    let spent = detail(&letters, &id).await;
    assert_eq!((spent.letter.status, spent.letter.retry_count, spent.letter.attempts), (LetterStatus::Failed, 2, 6));
    assert_eq!((spent.letter.scheduled_at, spent.history.len()), (None, 2));
    let last = &spent.history[1];
    assert_eq!((last.error_code.as_deref(), last.duration), (Some("500"), Duration::from_millis(12)));
    assert_eq!(last.trigger, Trigger::Scheduled);
    assert_eq!(letters.claim(10).await.unwrap().next_due, None);
}

#[tokio::test]
async fn a_replay_is_one_attempt_beside_the_schedule() {
    let file = File::new();
    let (_, letters) = letters(&file).await;
    let mut waiting = letter("1");
    waiting.first_delay = Some(LEASE);
    letters.intake(vec![waiting]).await.unwrap();
    let id = letters.of_event("event-1").await.unwrap()[0].id.clone();
    let replay = letters.replay(vec![id.clone(), "nobody".to_owned()], Some("fixed".to_owned())).await.unwrap();
    assert_eq!(replay.matched, 1);
    assert_eq!(letters.replay(vec![id.clone()], None).await.unwrap().matched, 0, "it waits already");
    assert_eq!(letters.replay_results(&replay.id).await.unwrap().pending, 1);

    let claimed = one(&letters).await;
    assert_eq!((claimed.attempt, claimed.budget), (1, Some(1)));
    assert_eq!(claimed.item.trigger, Trigger::Replay { replay_id: replay.id.clone() });
    assert_eq!(settle(&letters, &claimed, retry(Duration::ZERO, false)).await, Settled::Applied);
    assert_eq!(settle(&letters, &one(&letters).await, Disposition::Dead(failure())).await, Settled::Applied);
    let failed = detail(&letters, &id).await;
    assert_eq!((failed.letter.retry_count, failed.letter.attempts, failed.letter.status), (0, 5, LetterStatus::Failed));
    assert!(failed.letter.scheduled_at.is_some(), "back on its schedule");
    assert_eq!((failed.letter.replay_id, failed.history.len()), (None, 1));
    let results = letters.replay_results(&replay.id).await.unwrap();
    let failed =
        ReplayResult { letter_id: id.clone(), status: LetterStatus::Failed, error_code: Some("500".to_owned()) };
    assert_eq!((results.pending, results.results), (0, vec![failed]));

    let again = letters.replay(vec![id.clone()], None).await.unwrap();
    assert_eq!(settle(&letters, &one(&letters).await, Disposition::Done).await, Settled::Applied);
    let done = detail(&letters, &id).await;
    assert_eq!(
        (done.letter.status, done.letter.retry_count, done.letter.scheduled_at),
        (LetterStatus::Processed, 0, None)
    );
    assert_eq!((done.history.len(), done.history[1].error_code.as_deref()), (2, None));
    assert_eq!(letters.replay_results(&again.id).await.unwrap().results[0].status, LetterStatus::Processed);
    assert_eq!(letters.replay(vec![id], None).await.unwrap().matched, 0, "delivered is delivered");
}

#[tokio::test]
async fn a_scheduled_success_answers_the_replay_that_was_asked_for_meanwhile() {
    let file = File::new();
    let (_, letters) = letters(&file).await;
    letters.intake(vec![letter("1")]).await.unwrap();
    let claimed = one(&letters).await;
    let replay = letters.replay(vec![claimed.item.id.clone()], None).await.unwrap();
    assert!(letters.claim(10).await.unwrap().items.is_empty(), "it is in flight");
    assert_eq!(settle(&letters, &claimed, Disposition::Done).await, Settled::Applied);
    let results = letters.replay_results(&replay.id).await.unwrap();
    assert_eq!((results.pending, results.results[0].status), (0, LetterStatus::Processed));
    assert_eq!(detail(&letters, &claimed.item.id).await.history[0].trigger, Trigger::Scheduled);
}

#[tokio::test]
async fn the_locks_of_a_process_go_with_it() {
    let file = File::new();
    let (database, one_owner) = letters(&file).await;
    let other = Letters::new(database, LEASE);
    one_owner.intake(vec![letter("1"), letter("2")]).await.unwrap();
    let held = one_owner.claim(1).await.unwrap().items;
    let theirs = other.claim(1).await.unwrap().items;
    one_owner.close().await.unwrap();
    assert_eq!(other.claim(10).await.unwrap().items[0].item.id, held[0].item.id);
    assert!(one_owner.claim(10).await.unwrap().items.is_empty(), "only its own");
    one_owner.void_leases().await.unwrap();
    assert_eq!(one_owner.claim(10).await.unwrap().items.len(), 2);
    assert_eq!(settle(&other, &theirs[0], Disposition::Done).await, Settled::LostLease);
}

#[tokio::test]
async fn what_is_in_flight_here_is_not_claimed_again_whatever_its_lock_says() {
    let file = File::new();
    let (database, here) = letters(&file).await;
    // As a clock that is put forward by more than a lease does.
    let void = || execute(&database, "UPDATE dlt_event SET locked_until = 0");
    here.intake(vec![letter("1"), letter("2")]).await.unwrap();
    let held = here.claim(10).await.unwrap().items;
    void().await;
    let again = here.claim(10).await.unwrap();
    assert!(again.items.is_empty() && again.next_due.is_none(), "both are being delivered: {again:?}");
    assert_eq!(settle(&here, &held[0], retry(Duration::ZERO, true)).await, Settled::Applied);
    here.release(&[&held[1]]).await.unwrap();
    let mut held = here.claim(10).await.unwrap().items;
    assert_eq!(held.len(), 2, "settled and released are free");

    // Another process takes one of them; who is told so holds it no longer.
    execute(&database, "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL").await;
    assert!(here.claim(10).await.unwrap().items.is_empty());
    let lost = held.remove(0);
    assert_eq!(here.renew(&[&lost]).await.unwrap(), [Settled::LostLease]);
    assert_eq!(one(&here).await.item.id, lost.item.id);
    assert_eq!(settle(&here, &lost, Disposition::Done).await, Settled::LostLease, "an elder claim");
    assert!(here.claim(10).await.unwrap().items.is_empty(), "frees nothing of the younger");
    here.close().await.unwrap();
    assert_eq!(here.claim(10).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn lists_are_filtered_sorted_and_paged() {
    let file = File::new();
    let (database, letters) = letters(&file).await;
    let mut special = letter("special");
    special.subscriber_id = "Audit_Team".to_owned();
    special.domain = "user-lifecycle".to_owned();
    special.event_type = "user.created".to_owned();
    special.error = "100% BROKEN_pipe".to_owned();
    special.readable = "{\"note\":\"Needle\"}".to_owned();
    letters.intake(vec![letter("1"), letter("2"), special, letter("4")]).await.unwrap();
    execute(
        &database,
        "UPDATE dlt_event SET retry_count = 9 WHERE delivery_id = '2';
         UPDATE dlt_event SET status = 2, created_at = created_at - 172800000 WHERE delivery_id = '1'",
    )
    .await;
    let found = |filter: LetterFilter| {
        let letters = letters.clone();
        async move {
            let page = letters.list(&filter).await.unwrap();
            assert!(!page.total_is_lower_bound);
            let items: Vec<String> = page.items.iter().map(|row| row.delivery_id.clone()).collect();
            (items.join(" "), page.total)
        }
    };
    let text = |text: &str| Some(text.to_owned());
    let any = LetterFilter::default;
    assert_eq!(found(any()).await, ("4 special 2 1".to_owned(), 4));
    let sorted = |by, descending| LetterFilter { sort: LetterSort { by, descending }, ..any() };
    assert_eq!(found(sorted(LetterSortKey::CreatedAt, false)).await.0, "1 2 special 4");
    assert_eq!(found(sorted(LetterSortKey::RetryCount, true)).await.0, "2 4 special 1");
    assert_eq!(found(sorted(LetterSortKey::UpdatedAt, false)).await.0, "1 2 special 4");
    assert_eq!(found(LetterFilter { page: 1, size: 3, ..any() }).await, ("1".to_owned(), 4));
    assert_eq!(found(LetterFilter { message_id: text("event-2"), ..any() }).await, ("2".to_owned(), 1));
    for filter in [
        LetterFilter { subscriber_id: text("Audit_Team"), ..any() },
        LetterFilter { domain: text("user-lifecycle"), ..any() },
        LetterFilter { event_type: text("user.created"), ..any() },
        LetterFilter { error: text("broken_PIPE"), ..any() },
        LetterFilter { error: text("0%"), ..any() },
        LetterFilter { q: text("audit_t"), ..any() },
        LetterFilter { q: text("EVENT-spec"), ..any() },
        LetterFilter { q: text("% broken"), ..any() },
    ] {
        assert_eq!(found(filter.clone()).await, ("special".to_owned(), 1), "{filter:?}");
    }
    for filter in [
        LetterFilter { error: text("b%n"), ..any() },
        LetterFilter { error: text("10_"), ..any() },
        LetterFilter { q: text("team"), ..any() },
        LetterFilter { q: text("needle"), ..any() },
        LetterFilter { message_id: text("' OR 1=1 --"), ..any() },
    ] {
        assert_eq!(found(filter.clone()).await, (String::new(), 0), "{filter:?}");
    }
    assert_eq!(found(LetterFilter { status: Some(LetterStatus::Failed), ..any() }).await.0, "1");
    let now = Utc::now();
    let span = |hours| LetterFilter {
        from: Some(now - TimeDelta::hours(hours)),
        to: Some(now + TimeDelta::hours(1)),
        ..any()
    };
    assert_eq!(found(span(23)).await.1, 3);
    assert_eq!(found(span(72)).await.1, 4);
    assert_eq!(found(LetterFilter { q: text("needle"), ..span(23) }).await.0, "special");
    assert_eq!(found(LetterFilter { q: text("needle"), ..span(24) }).await.1, 0, "too wide to search payloads");
    assert!(letters.get("nobody").await.unwrap().is_none());
}

#[tokio::test]
async fn a_long_list_is_counted_to_ten_thousand() {
    let file = File::new();
    let (database, letters) = letters(&file).await;
    execute(
        &database,
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 10001)
         INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
             envelope, readable, error, error_code, first_failed_at, created_at, updated_at)
         SELECT printf('%06d', n), n, n, 's', 's', 't', 'd', 'e', x'', '{}', 'e', 'c', 0, n, n FROM n",
    )
    .await;
    let page = letters.list(&LetterFilter { size: 2, ..LetterFilter::default() }).await.unwrap();
    assert_eq!((page.items.len(), page.total, page.total_is_lower_bound), (2, 10_000, true));
    execute(&database, "DELETE FROM dlt_event WHERE id = '000001'").await;
    let page = letters.list(&LetterFilter::default()).await.unwrap();
    assert_eq!((page.total, page.total_is_lower_bound), (10_000, false));
}

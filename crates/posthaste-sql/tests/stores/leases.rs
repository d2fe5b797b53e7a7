//! Row leases: what a process that died leaves behind, and how the row that kills processes is found.

use std::collections::HashMap;
use std::time::Duration;

use posthaste_core::outbox::{Mode, OutboxStatus};
use posthaste_core::{Disposition, Failure, Settled, Settlement, Source};

use crate::support::{File, event, ids, settle};

/// Lets every lease in the table have ended an hour ago, as if that time had passed.
async fn an_hour_passes(file: &File) {
    file.execute("UPDATE outbox_event SET locked_at = datetime(locked_at, '-1 hour')").await;
}

async fn losses(file: &File, id: &'static str) -> i64 {
    let pool = file.pool().await;
    let sql = "SELECT lease_losses FROM outbox_event WHERE event_id = ?";
    sqlx::query_scalar(sql).bind(id).fetch_one(&pool).await.unwrap()
}

#[tokio::test]
async fn suspects_are_claimed_one_by_one_and_apart_from_others() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    outbox.ingest(["1", "2", "3", "4", "5"].map(|id| event(id, "t", "{}")).to_vec()).await.unwrap();
    let died = outbox.dispatcher_source();
    assert_eq!(ids(&died.claim(3).await.unwrap().items), ["1", "2", "3"]);
    an_hour_passes(&file).await;

    let node = file.dispatcher(Mode::MultiNode).await;
    let source = node.dispatcher_source();
    let first = source.claim(10).await.unwrap();
    assert_eq!(ids(&first.items), ["1"], "alone");
    assert_eq!(first.next_due, Some(Duration::ZERO), "there is more");
    let others = source.claim(10).await.unwrap();
    assert_eq!(ids(&others.items), ["4", "5"], "no second suspect while one is in flight");
    assert!(source.claim(10).await.unwrap().items.is_empty());
    // Another node may have one of its own.
    let third = file.dispatcher(Mode::MultiNode).await;
    let third = third.dispatcher_source();
    let second = third.claim(10).await.unwrap().items;
    assert_eq!(ids(&second), ["2"]);
    assert_eq!(settle(&third, &second[0], Disposition::Done).await, Settled::Applied);

    assert_eq!(settle(&source, &first.items[0], Disposition::Done).await, Settled::Applied);
    let woken = tokio::time::timeout(Duration::from_secs(5), source.wakeup().signalled()).await;
    assert!(woken.is_ok(), "the next suspect may come");
    let last = source.claim(10).await.unwrap().items;
    assert_eq!(ids(&last), ["3"]);
    source.release(&[&last[0]]).await.unwrap();
    assert_eq!(ids(&third.claim(10).await.unwrap().items), ["3"], "released at once, and still a suspect");
    assert_eq!(losses(&file, "3").await, 1, "a clean release is no loss");
    assert_eq!(losses(&file, "4").await, 0);
}

#[tokio::test]
async fn a_row_that_ends_three_processes_goes_dead() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    outbox.ingest(vec![event("killer", "t", "{}"), event("innocent", "t", "{}")]).await.unwrap();
    for expected in [&["killer", "innocent"][..], &["killer"], &["killer"]] {
        let node = file.dispatcher(Mode::MultiNode).await;
        let items = node.dispatcher_source().claim(10).await.unwrap().items;
        assert_eq!(ids(&items), expected);
        assert!(items.iter().all(|claimed| claimed.attempt == 1), "losses are no attempts");
        an_hour_passes(&file).await;
    }
    let source = outbox.dispatcher_source();
    let buried = source.claim(10).await.unwrap();
    assert!(buried.items.is_empty() && buried.next_due == Some(Duration::ZERO));
    let row = outbox.find("killer").await.unwrap().unwrap();
    assert_eq!((row.status, row.attempts, losses(&file, "killer").await), (OutboxStatus::Dead, 0, 3));
    assert!(row.done_at.is_some() && row.last_error.unwrap().starts_with("lease_lost: "));
    let innocent = source.claim(10).await.unwrap().items;
    assert_eq!(ids(&innocent), ["innocent"]);
    assert_eq!(settle(&source, &innocent[0], Disposition::Done).await, Settled::Applied);
    assert_eq!(losses(&file, "innocent").await, 1);
}

#[tokio::test]
async fn an_attempt_that_came_to_an_end_clears_the_suspicion() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    outbox.ingest(vec![event("1", "t", "{}"), event("2", "t", "{}")]).await.unwrap();
    outbox.dispatcher_source().claim(1).await.unwrap();
    an_hour_passes(&file).await;
    let node = file.dispatcher(Mode::MultiNode).await;
    let source = node.dispatcher_source();
    let suspect = source.claim(10).await.unwrap().items;
    assert_eq!((ids(&suspect), losses(&file, "1").await), (vec!["1"], 1));
    let again =
        Disposition::Retry { after: Duration::ZERO, counted: true, failure: Some(Failure::transient("503", "busy")) };
    assert_eq!(settle(&source, &suspect[0], again).await, Settled::Applied);
    assert_eq!(losses(&file, "1").await, 0);
    assert_eq!(ids(&source.claim(10).await.unwrap().items), ["2", "1"], "together with others");
}

#[tokio::test]
async fn what_this_process_holds_it_does_not_claim_again_when_the_databases_clock_jumps() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    outbox.ingest(vec![event("1", "t", "{}")]).await.unwrap();
    let source = outbox.dispatcher_source();
    let held = source.claim(10).await.unwrap().items;
    an_hour_passes(&file).await;
    assert!(source.claim(10).await.unwrap().items.is_empty());
    assert_eq!(source.renew(&[&held[0]]).await.unwrap(), [Settled::Applied]);
    assert_eq!(settle(&source, &held[0], Disposition::Done).await, Settled::Applied);
}

/// Every delivery is counted, not every distinct event.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_drain_together_deliver_everything_once() {
    let file = File::new();
    let outbox = file.dispatcher(Mode::MultiNode).await;
    outbox.ingest((0..3_000).map(|number| event(&number.to_string(), "t", "{}")).collect()).await.unwrap();
    let drain = || async {
        let node = file.dispatcher(Mode::MultiNode).await;
        let source = node.dispatcher_source();
        let mut seen = Vec::new();
        loop {
            let claim = source.claim(70).await.unwrap();
            if claim.items.is_empty() && claim.next_due.is_none() {
                return seen;
            }
            assert!(claim.items.is_sorted_by_key(|claimed| claimed.item.seq), "in order");
            for settled in claim.items.chunks(30) {
                let done = |claimed| Settlement { claimed, disposition: &Disposition::Done, took: Duration::ZERO };
                let settlements: Vec<_> = settled.iter().map(done).collect();
                let answers = source.settle(&settlements).await.unwrap();
                assert!(answers.iter().all(|answer| *answer == Settled::Applied));
            }
            seen.extend(ids(&claim.items).into_iter().map(str::to_owned));
        }
    };
    let (one, two, three) = tokio::join!(drain(), drain(), drain());
    let mut deliveries: HashMap<String, usize> = HashMap::new();
    for id in [one, two, three].into_iter().flatten() {
        *deliveries.entry(id).or_default() += 1;
    }
    assert_eq!(deliveries.len(), 3_000);
    assert!(deliveries.values().all(|count| *count == 1));
    assert_eq!(file.ask::<i64>("SELECT count(*) FROM outbox_event WHERE status = 1").await, 3_000);
}

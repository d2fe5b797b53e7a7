//! Dead letters on PostgreSQL: several processes at once, and tests that change the table itself. The laws are in
//! `hub_laws.rs`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use posthaste_backend_tests::hub_laws::dead_letters::dead_letter;
use posthaste_core::hub_store::{
    DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterFilter, DeadLetterQueries, DeadLetterReplays,
    DeadLetterSource, DeadLetterStatus, DeadLetterStore, NewDeadLetter,
};
use posthaste_core::{Disposition, Settled, Settlement, Source};
use posthaste_sql::postgres::{Database, DeadLetterTable, MIN_CONNECTIONS, migrate_hub};

use crate::support::{LEASE, Postgres};

/// The table as one more process sees it.
async fn process(postgres: &Postgres) -> DeadLetterTable {
    let database = Database::connect(postgres.url.parse().unwrap(), MIN_CONNECTIONS).await.unwrap();
    DeadLetterTable::new(database)
}

async fn start() -> (Postgres, DeadLetterTable) {
    let postgres = Postgres::start().await;
    migrate_hub(&postgres.pool).await.unwrap();
    let table = process(&postgres).await;
    (postgres, table)
}

fn letters(numbers: impl Iterator<Item = usize>) -> Vec<NewDeadLetter> {
    numbers.map(|number| dead_letter(&number.to_string())).collect()
}

/// The same deliveries in opposite orders: neither process waits for the other for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_insert_the_same_deliveries_at_once_insert_each_once() {
    let (postgres, table) = start().await;
    for round in 0..5 {
        let numbers = round * 1_000..round * 1_000 + 700;
        let (one, other) = (process(&postgres).await, process(&postgres).await);
        let (forward, backward) = (letters(numbers.clone()), letters(numbers.rev()));
        let (first, second) = tokio::join!(one.insert(forward), other.insert(backward));
        first.unwrap();
        second.unwrap();
    }
    assert_eq!(table.depth_by_status().await.unwrap()[0], (DeadLetterStatus::New, 3_500));
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM dlt_payload").await, 3_500);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_claim_at_once_claim_each_dead_letter_once() {
    let (postgres, table) = start().await;
    table.insert(letters(0..300)).await.unwrap();
    let mut sources = Vec::new();
    for _ in 0..4 {
        sources.push(DeadLetterSource::new(Arc::new(process(&postgres).await), LEASE));
    }
    let drain = async |source: &DeadLetterSource| {
        let mut claimed = Vec::new();
        loop {
            let items = source.claim(20).await.unwrap().items;
            if items.is_empty() {
                return claimed;
            }
            // The claim of another process may look at the same rows, and skips them. Then a settlement is repeated.
            let mut waiting: Vec<_> = items.iter().collect();
            while !waiting.is_empty() {
                let settlement =
                    |claimed| Settlement { claimed, disposition: &Disposition::Done, took: Duration::ZERO };
                let settlements: Vec<_> = waiting.iter().copied().map(settlement).collect();
                let settled = source.settle(&settlements).await.unwrap();
                let mut settled = settled.into_iter();
                waiting.retain(|_| match settled.next() {
                    Some(Settled::Applied) => false,
                    Some(Settled::Locked) => true,
                    other => panic!("{other:?}"),
                });
            }
            claimed.extend(items.into_iter().map(|claimed| claimed.item.id));
        }
    };
    let claimed: Vec<String> = join_all(sources.iter().map(drain)).await.concat();
    assert_eq!((claimed.len(), claimed.iter().collect::<HashSet<_>>().len()), (300, 300));
    let depth = table.depth_by_status().await.unwrap();
    assert_eq!(depth, [(DeadLetterStatus::New, 0), (DeadLetterStatus::Processed, 300), (DeadLetterStatus::Failed, 0)]);
    assert_eq!(postgres.ask::<i64>("SELECT count(*) FROM retry_history").await, 300);
}

/// Neither a settlement nor a renewal waits for a dead letter that an operator has locked.
#[tokio::test]
async fn a_locked_dead_letter_is_skipped_and_settled_later() {
    let (postgres, table) = start().await;
    let source = DeadLetterSource::new(Arc::new(table), LEASE);
    source.insert(letters(0..2)).await.unwrap();
    let items = source.claim(10).await.unwrap().items;
    let mut operator = postgres.pool.begin().await.unwrap();
    let look = "UPDATE dlt_event SET error = 'looked at' WHERE delivery_id = '0'";
    sqlx::raw_sql(look).execute(&mut *operator).await.unwrap();
    assert_eq!(source.renew(&[&items[0], &items[1]]).await.unwrap(), [Settled::Locked, Settled::Applied]);
    let settlements: Vec<_> = items
        .iter()
        .map(|claimed| Settlement { claimed, disposition: &Disposition::Done, took: Duration::ZERO })
        .collect();
    assert_eq!(source.settle(&settlements).await.unwrap(), [Settled::Locked, Settled::Applied]);
    assert!(source.claim(10).await.unwrap().items.is_empty(), "both are leased or delivered");
    operator.commit().await.unwrap();
    assert_eq!(source.settle(&settlements[..1]).await.unwrap(), [Settled::Applied]);
}

#[tokio::test]
async fn a_dead_letter_that_occurs_twice_is_settled_by_its_first_update() {
    let (_postgres, table) = start().await;
    let source = DeadLetterSource::new(Arc::new(table.clone()), LEASE);
    source.insert(letters(0..1)).await.unwrap();
    let items = source.claim(10).await.unwrap().items;
    let dead = Disposition::Dead(posthaste_core::Failure::permanent("code", "second"));
    let settlement = |disposition| Settlement { claimed: &items[0], disposition, took: Duration::ZERO };
    let settled = source.settle(&[settlement(&Disposition::Done), settlement(&dead)]).await.unwrap();
    assert_eq!(settled, [Settled::Applied, Settled::LostLease]);
    let detail = table.get(&items[0].item.id).await.unwrap().unwrap();
    assert_eq!((detail.row.status, detail.history.len()), (DeadLetterStatus::Processed, 1));
}

#[tokio::test]
async fn a_dead_letter_without_its_payload_is_given_up_and_keeps_no_other_from_being_claimed() {
    let (postgres, table) = start().await;
    table.insert(letters(0..2)).await.unwrap();
    postgres
        .execute(
            "DELETE FROM dlt_payload USING dlt_event
             WHERE letter_id = id AND delivery_id = '0'",
        )
        .await;
    let request = DeadLetterClaimRequest {
        claim_id: DeadLetterClaimId { owner: "owner".into(), number: 1 },
        lease: LEASE,
        in_flight: Vec::new(),
        subscriptions: vec![("subscription".to_owned(), 10)],
    };
    let claimed = table.claim(request).await.unwrap();
    assert_eq!(claimed.iter().map(|letter| letter.fields.delivery_id.as_str()).collect::<Vec<_>>(), ["1"]);
    let given_up = &table.of_event("event-0").await.unwrap()[0];
    assert_eq!((given_up.status, given_up.error_code.as_str()), (DeadLetterStatus::Failed, "unreadable"));
    assert_eq!(given_up.scheduled_at, None);
}

#[tokio::test]
async fn texts_with_the_one_character_that_postgres_lacks_are_kept_without_it() {
    let (_postgres, table) = start().await;
    let letter = NewDeadLetter { error: "a\0b".to_owned(), readable: "\"\0\"".to_owned(), ..dead_letter("1") };
    table.insert(vec![letter]).await.unwrap();
    let found = &table.of_event("event-1").await.unwrap()[0];
    assert_eq!(found.error, "a\u{fffd}b");
    let any = DeadLetterFilter::default;
    let filter = DeadLetterFilter { q: Some("\0".to_owned()), ..any() };
    assert_eq!(table.list(&filter).await.unwrap().total, 0);
    assert!(table.of_event("event\0").await.unwrap().is_empty());
    assert!(table.get("\0").await.unwrap().is_none());
    assert_eq!(table.replay(vec!["\0".to_owned()], Some("\0".to_owned())).await.unwrap().matched, 0);
}

#[tokio::test]
async fn a_long_list_is_counted_to_ten_thousand() {
    let (postgres, table) = start().await;
    postgres
        .execute(
            "INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain,
                 endpoint, error, error_code, first_failed_at)
             SELECT to_char(n, '000000'), n, n, 's', 's', 't', 'd', 'e', 'e', 'c', now()
             FROM generate_series(1, 10001) AS n",
        )
        .await;
    let page = table.list(&DeadLetterFilter { size: 2, ..DeadLetterFilter::default() }).await.unwrap();
    assert_eq!((page.items.len(), page.total, page.total_is_lower_bound), (2, 10_000, true));
    postgres.execute("DELETE FROM dlt_event WHERE delivery_id = '1'").await;
    let page = table.list(&DeadLetterFilter::default()).await.unwrap();
    assert_eq!((page.total, page.total_is_lower_bound), (10_000, false));
    assert_eq!(table.depth_by_status().await.unwrap()[0].1, 10_000);
}

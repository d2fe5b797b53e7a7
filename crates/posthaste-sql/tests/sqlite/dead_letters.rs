//! Dead letters on SQLite: tests that read or change the table itself. The laws are in `hub_laws.rs`.

use std::sync::Arc;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use posthaste_backend_tests::hub_laws::dead_letters::dead_letter;
use posthaste_core::hub_store::{
    DeadLetter, DeadLetterFilter, DeadLetterQueries, DeadLetterSort, DeadLetterSortKey, DeadLetterSource,
    DeadLetterStatus,
};
use posthaste_core::{Claimed, Disposition, Failure, Settled, Source};
use posthaste_sql::sqlite::{Database, DeadLetterTable};

use crate::support::{File, LEASE, execute, settle};

async fn open(file: &File) -> (Database, DeadLetterTable, DeadLetterSource) {
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    let table = DeadLetterTable::new(database.clone());
    (database, table.clone(), DeadLetterSource::new(Arc::new(table), LEASE))
}

async fn one(source: &DeadLetterSource) -> Claimed<DeadLetter> {
    let mut items = source.claim(10).await.unwrap().items;
    assert_eq!(items.len(), 1);
    items.remove(0)
}

fn retry() -> Disposition {
    let failure = Failure::transient("500", "broken").cause("a null somewhere");
    Disposition::Retry { after: Duration::ZERO, counted: true, failure: Some(failure) }
}

#[tokio::test]
async fn a_dead_letter_in_flight_is_not_claimed_again_after_its_lease_ended() {
    let file = File::new();
    let (database, _, here) = open(&file).await;
    // The same effect as a clock that is set forward by more than a lease.
    let void = || execute(&database, "UPDATE dlt_event SET locked_until = 0");
    here.insert(vec![dead_letter("1"), dead_letter("2")]).await.unwrap();
    let claimed = here.claim(10).await.unwrap().items;
    void().await;
    let again = here.claim(10).await.unwrap();
    assert!(again.items.is_empty() && again.next_due.is_none(), "both are being delivered: {again:?}");
    assert_eq!(settle(&here, &claimed[0], retry()).await, Settled::Applied);
    here.release(&[&claimed[1]]).await.unwrap();
    let mut claimed = here.claim(10).await.unwrap().items;
    assert_eq!(claimed.len(), 2, "settled and released dead letters can be claimed");

    // Another process claims one of them, so the renewal returns a lost lease.
    execute(&database, "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL").await;
    assert!(here.claim(10).await.unwrap().items.is_empty());
    let lost = claimed.remove(0);
    assert_eq!(here.renew(&[&lost]).await.unwrap(), [Settled::LostLease]);
    assert_eq!(one(&here).await.item.id, lost.item.id);
    assert_eq!(settle(&here, &lost, Disposition::Done).await, Settled::LostLease, "an earlier claim");
    assert!(here.claim(10).await.unwrap().items.is_empty(), "the later claim is unchanged");
    here.close().await.unwrap();
    assert_eq!(here.claim(10).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn voided_leases_are_free_for_every_process() {
    let file = File::new();
    let (_, table, alive) = open(&file).await;
    let (_, _, killed) = open(&file).await;
    alive.insert(vec![dead_letter("1"), dead_letter("2")]).await.unwrap();
    let claimed = killed.claim(10).await.unwrap().items;
    assert_eq!(claimed.len(), 2);
    assert!(alive.claim(10).await.unwrap().items.is_empty());
    table.void_leases().await.unwrap();
    assert_eq!(alive.claim(10).await.unwrap().items.len(), 2);
    assert_eq!(settle(&killed, &claimed[0], Disposition::Done).await, Settled::LostLease);
}

#[tokio::test]
async fn lists_are_sorted_by_the_times_and_counts_in_the_table() {
    let file = File::new();
    let (database, table, source) = open(&file).await;
    source.insert(["1", "2", "3", "4"].map(dead_letter).into()).await.unwrap();
    execute(
        &database,
        "UPDATE dlt_event SET retry_count = 9 WHERE delivery_id = '2';
         UPDATE dlt_event SET status = 2, created_at = created_at - 172800000 WHERE delivery_id = '1'",
    )
    .await;
    let found = async |filter: DeadLetterFilter| {
        let page = table.list(&filter).await.unwrap();
        let items: Vec<String> = page.items.iter().map(|row| row.fields.delivery_id.clone()).collect();
        (items.join(" "), page.total)
    };
    let any = DeadLetterFilter::default;
    let sorted = |by, descending| DeadLetterFilter { sort: DeadLetterSort { by, descending }, ..any() };
    assert_eq!(found(sorted(DeadLetterSortKey::CreatedAt, false)).await.0, "1 2 3 4");
    assert_eq!(found(sorted(DeadLetterSortKey::RetryCount, true)).await.0, "2 4 3 1");
    assert_eq!(
        found(sorted(DeadLetterSortKey::UpdatedAt, false)).await.0,
        "1 2 3 4",
        "equal keys are in the order of insertion"
    );
    assert_eq!(found(DeadLetterFilter { status: Some(DeadLetterStatus::Failed), ..any() }).await.0, "1");
    let now = Utc::now();
    let span = |hours| DeadLetterFilter {
        from: Some(now - TimeDelta::hours(hours)),
        to: Some(now + TimeDelta::hours(1)),
        ..any()
    };
    assert_eq!(found(span(23)).await.1, 3);
    assert_eq!(found(span(72)).await.1, 4);
}

#[tokio::test]
async fn a_long_list_is_counted_to_ten_thousand() {
    let file = File::new();
    let (database, table, _) = open(&file).await;
    execute(
        &database,
        "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 10001)
         INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
             error, error_code, first_failed_at, created_at, updated_at)
         SELECT printf('%06d', n), n, n, 's', 's', 't', 'd', 'e', 'e', 'c', 0, n, n FROM n",
    )
    .await;
    let page = table.list(&DeadLetterFilter { size: 2, ..DeadLetterFilter::default() }).await.unwrap();
    assert_eq!((page.items.len(), page.total, page.total_is_lower_bound), (2, 10_000, true));
    execute(&database, "DELETE FROM dlt_event WHERE id = '000001'").await;
    let page = table.list(&DeadLetterFilter::default()).await.unwrap();
    assert_eq!((page.total, page.total_is_lower_bound), (10_000, false));
}

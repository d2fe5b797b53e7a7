//! A server of the previous release and one of this release on the same database.
//!
//! The files in `rolling_upgrade` are statements as the programs of schema 6 send them. They are a record: they change only
//! when programs that old are no longer supported. (On SQLite no two servers run at once; see `newer_schema`.)

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use posthaste_backend_tests::hub_laws::dead_letters::dead_letter;
use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{Admission, DeadLetterSource, HubDatabase as _, HubOptions, HubStores, Ingested};
use posthaste_core::{Claimed, Disposition, Event, Settled, Settlement, Source};
use posthaste_sql::postgres::{HubDatabase, MIN_CONNECTIONS};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};

use crate::support::LEASE;

const INGEST: &str = include_str!("rolling_upgrade/ingest.sql");
const CLAIM: &str = include_str!("rolling_upgrade/claim.sql");
const SETTLE: &str = include_str!("rolling_upgrade/settle.sql");
const DEAD_LETTER_INSERT: &str = include_str!("rolling_upgrade/dead_letter_insert.sql");
const DEAD_LETTER_CLAIM: &str = include_str!("rolling_upgrade/dead_letter_claim.sql");
const DEAD_LETTER_SETTLE: &str = include_str!("rolling_upgrade/dead_letter_settle.sql");

const OPTIONS: HubOptions = HubOptions { lease: LEASE, max_channels: 10, partitions: 1, is_ordered: false };
const EVENTS: usize = 40;

/// A process of the previous release.
struct Previous(PgPool);

impl Previous {
    async fn ingest(&self, ids: &[String]) -> usize {
        let all = |value: Option<&str>| vec![value.map(str::to_owned); ids.len()];
        let times = || vec![None::<DateTime<Utc>>; ids.len()];
        let ingest = sqlx::query(INGEST).bind(ids).bind(all(Some("t"))).bind(all(Some("__GLOBAL__"))).bind(all(None));
        let ingest = ingest.bind(all(None)).bind(all(Some("s"))).bind(all(None)).bind(all(None)).bind(all(Some("{}")));
        let ingest = ingest.bind(vec![None::<Vec<u8>>; ids.len()]).bind(all(None)).bind(all(None)).bind(times());
        let ingest = ingest.bind(times()).bind(vec![0i64; ids.len()]).bind(None::<String>);
        ingest.bind(vec![None::<bool>; ids.len()]).fetch_all(&self.0).await.unwrap().len()
    }

    /// The numbers and ids of the rows.
    async fn claim(&self, most: i64) -> (Vec<i64>, Vec<String>) {
        let begin = DateTime::<Utc>::from_timestamp(0, 0);
        let claim = sqlx::query(CLAIM).bind(Vec::<i64>::new()).bind(most).bind(begin).bind(0i64).bind(0i64);
        let claim = claim.bind(LEASE.as_micros() as i64).bind(true).bind("previous").bind("t");
        let rows = claim.fetch_all(&self.0).await.unwrap();
        rows.iter().map(|row| (row.get::<i64, _>("seq"), row.get::<String, _>("event_id"))).unzip()
    }

    async fn settle(&self, rows: &[i64]) -> usize {
        let settle = sqlx::query(SETTLE).bind(vec!["previous"]).bind(rows);
        settle.fetch_all(&self.0).await.unwrap().len()
    }

    async fn insert_dead_letters(&self, deliveries: &[String]) {
        let all = |value: &str| vec![value.to_owned(); deliveries.len()];
        let insert = sqlx::query(DEAD_LETTER_INSERT).bind(deliveries).bind(deliveries).bind(deliveries);
        let insert = insert.bind(all("subscription")).bind(all("billing")).bind(all("t")).bind(all("organization"));
        let insert =
            insert.bind(all("http://e")).bind(vec![4i64; deliveries.len()]).bind(all("error")).bind(all("503"));
        let insert = insert.bind(vec![None::<String>; deliveries.len()]).bind(vec![Utc::now(); deliveries.len()]);
        let insert = insert.bind(vec![false; deliveries.len()]).bind(vec![0i64; deliveries.len()]);
        insert.bind(vec![vec![0u8]; deliveries.len()]).bind(all("{}")).execute(&self.0).await.unwrap();
    }

    /// The ids of the dead letters.
    async fn claim_dead_letters(&self, most: i64) -> Vec<String> {
        let claim = sqlx::query(DEAD_LETTER_CLAIM).bind(Vec::<String>::new()).bind("previous:1");
        let claim = claim.bind(LEASE.as_micros() as i64).bind(vec!["subscription"]).bind(vec![most]);
        let rows = claim.fetch_all(&self.0).await.unwrap();
        rows.iter().map(|row: &PgRow| row.get("id")).collect()
    }

    /// Settles them as delivered.
    async fn settle_dead_letters(&self, ids: &[String]) {
        let all = |value: &str| vec![value.to_owned(); ids.len()];
        let (numbers, none) = (|value: i32| vec![value; ids.len()], || vec![None::<String>; ids.len()]);
        let settle = sqlx::query(DEAD_LETTER_SETTLE).bind(ids).bind(all("SCHEDULED")).bind(vec![1i16; ids.len()]);
        let settle = settle.bind(numbers(1)).bind(numbers(1)).bind(vec![false; ids.len()]).bind(all("clear"));
        let settle = settle.bind(vec![None::<i64>; ids.len()]).bind(all("keep")).bind(vec![None::<i64>; ids.len()]);
        let settle = settle.bind(none()).bind(none()).bind(none()).bind(vec![5i64; ids.len()]);
        settle.execute(&self.0).await.unwrap();
    }
}

async fn start() -> (Previous, HubStores) {
    let url = servers::postgres().await;
    let database = HubDatabase::open(&url, MIN_CONNECTIONS).await.unwrap();
    database.migrate().await.unwrap();
    (Previous(PgPool::connect(&url).await.unwrap()), database.open(OPTIONS).await.unwrap())
}

fn ids(name: &str) -> Vec<String> {
    (0..EVENTS).map(|number| format!("{name}-{number}")).collect()
}

async fn settle_all<S: Source + ?Sized>(source: &S, items: &[Claimed<S::Item>]) {
    let done = |claimed| Settlement { claimed, disposition: &Disposition::Done, took: Duration::ZERO };
    let settled = source.settle(&items.iter().map(done).collect::<Vec<_>>()).await.unwrap();
    assert!(settled.iter().all(|settled| *settled == Settled::Applied), "{settled:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn both_programs_deliver_the_events_of_both_once() {
    let (previous, current) = start().await;
    assert_eq!(previous.ingest(&ids("previous")).await, EVENTS);
    let event = |id: String| Arc::new(Event::builder("t").id(id).text("{}".to_owned()).build().unwrap());
    let ingested = current.channels.ingest(ids("current").into_iter().map(event).collect(), false).await.unwrap();
    assert!(ingested.iter().all(|admission| *admission == Admission::Ingested(Ingested::Stored)));
    let again = current.channels.ingest(vec![event("previous-0".to_owned())], false).await.unwrap();
    assert_eq!(again, [Admission::Ingested(Ingested::Known)]);
    assert_eq!(previous.ingest(&["current-0".to_owned()]).await, 0, "it is known");

    let source = current.outbox.source("t");
    let mut claimed = Vec::new();
    loop {
        let (rows, theirs) = previous.claim(7).await;
        let ours = source.claim(11).await.unwrap().items;
        if rows.is_empty() && ours.is_empty() {
            break;
        }
        assert_eq!(previous.settle(&rows).await, rows.len());
        settle_all(&*source, &ours).await;
        claimed.extend(theirs);
        claimed.extend(ours.iter().map(|claimed| claimed.item.event.id().to_owned()));
    }
    let mut expected = [ids("previous"), ids("current")].concat();
    claimed.sort();
    expected.sort();
    assert_eq!(claimed, expected, "each event is claimed once");
    let unfinished = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM outbox_event WHERE status <> 1");
    assert_eq!(unfinished.fetch_one(&previous.0).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn both_programs_retry_the_dead_letters_of_both_once() {
    let (previous, current) = start().await;
    previous.insert_dead_letters(&ids("previous")).await;
    let source = DeadLetterSource::new(current.dead_letters.clone(), LEASE);
    source.insert(ids("current").iter().map(|id| dead_letter(id)).collect()).await.unwrap();
    // Each delivery is inserted once, whichever program is first.
    source.insert(ids("previous").iter().map(|id| dead_letter(id)).collect()).await.unwrap();
    previous.insert_dead_letters(&ids("current")).await;

    let mut retried = 0;
    loop {
        let theirs = previous.claim_dead_letters(7).await;
        let ours = source.claim(11).await.unwrap().items;
        if theirs.is_empty() && ours.is_empty() {
            break;
        }
        previous.settle_dead_letters(&theirs).await;
        settle_all(&source, &ours).await;
        retried += theirs.len() + ours.len();
    }
    assert_eq!(retried, 2 * EVENTS);
    let depth = "SELECT string_agg(status || ':' || letters, ' ') FROM
        (SELECT status, sum(letters) AS letters FROM dlt_depth GROUP BY status HAVING sum(letters) <> 0) AS depth";
    let depth: String = sqlx::query_scalar(depth).fetch_one(&previous.0).await.unwrap();
    assert_eq!(depth, format!("1:{}", 2 * EVENTS));
    let history = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM retry_history").fetch_one(&previous.0);
    assert_eq!(history.await.unwrap(), 2 * EVENTS as i64);
}

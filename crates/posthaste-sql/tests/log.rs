//! The built-in bus on SQLite: the laws of the bus, and tests of behaviour that only a file has.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_backend_tests::bus_laws::{BusHarness, LEASE};
use posthaste_backend_tests::hub_laws::bus_inspector::{InspectedBus, InspectorHarness};
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, PublishError, Record, Topics};
use posthaste_core::hub_store::{BusInspector, ResetTo};
use posthaste_core::log::LogOptions;
use posthaste_sql::sqlite::{Database, Log, LogTables};
use tempfile::TempDir;

/// One file; every log on it has connections of its own, as another process would.
struct File {
    folder: TempDir,
    options: LogOptions,
}

impl File {
    fn new(partitions: u32, lease: Duration) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            options: LogOptions { partitions, lease, ..LogOptions::default() },
        }
    }

    async fn database(&self) -> Database {
        let url = format!("sqlite://{}", self.folder.path().join("log.db").display());
        let database = Database::open(&url).await.unwrap();
        database.migrate_hub().await.unwrap();
        database
    }
}

#[async_trait]
impl InspectorHarness for File {
    async fn open_bus(&self) -> InspectedBus {
        let log = self.open().await;
        let inspector = Arc::new(log.store().clone());
        InspectedBus { bus: Arc::new(log), inspector }
    }
}

#[async_trait]
impl BusHarness for File {
    type Bus = Log;

    async fn open_with(&self, lease: Duration) -> Log {
        let options = LogOptions { lease, ..self.options.clone() };
        Log::new(LogTables::new(self.database().await), options)
    }

    async fn open(&self) -> Log {
        self.open_with(self.options.lease).await
    }

    async fn remove_below(&self, topic: &str, offset: i64) {
        const REMOVE: &str = "DELETE FROM log_record WHERE \"offset\" < ?
            AND partition_id IN (SELECT id FROM log_partition WHERE topic = ?)";
        let topic = topic.to_owned();
        let remove = self.database().await;
        let remove = remove.write("remove records", move |connection| {
            Box::pin(sqlx::query(REMOVE).bind(offset).bind(topic.clone()).execute(connection))
        });
        remove.await.unwrap();
    }

    async fn reset(&self, group: &str, topic: &str) {
        let log = LogTables::new(self.database().await);
        log.reset(group, topic, None, ResetTo::Earliest).await.unwrap();
    }

    fn max_completed_text(&self) -> usize {
        posthaste_core::log::MAX_COMPLETED_TEXT
    }
}

mod with_one_partition {
    posthaste_backend_tests::bus_laws!(super::File::new(1, super::LEASE));
}

mod with_four_partitions {
    posthaste_backend_tests::bus_laws!(super::File::new(4, super::LEASE));
    posthaste_backend_tests::bus_inspector_laws!(super::File::new(4, super::LONG));
}

const LONG: Duration = Duration::from_secs(60);

fn record(topic: &str, number: u64) -> Record {
    let key = format!("key {number}");
    Record { topic: topic.into(), route: number, key, value: Bytes::from_static(b"value"), headers: Vec::new() }
}

async fn publish(log: &Log, records: impl IntoIterator<Item = Record>) {
    for result in log.publish(records.into_iter().collect()).await {
        result.unwrap();
    }
}

async fn join(log: &Log, topic: &str) -> Box<dyn Consumer> {
    log.subscribe("group", Topics::Named(vec![topic.to_owned()])).await.unwrap()
}

fn offsets(fetched: &[Fetched]) -> Vec<i64> {
    fetched.iter().map(|fetched| fetched.position.offset).collect()
}

async fn ack<'a>(consumer: &dyn Consumer, fetched: impl IntoIterator<Item = &'a Fetched>) {
    let positions: Vec<&Position> = fetched.into_iter().map(|fetched| &fetched.position).collect();
    assert_eq!(consumer.ack(&positions).await.unwrap(), vec![Settled::Applied; positions.len()]);
}

#[tokio::test]
async fn a_restart_continues_after_the_acks() {
    let file = File::new(1, LONG);
    let database = file.database().await;
    let log = Log::new(LogTables::new(database.clone()), file.options.clone());
    publish(&log, (0..10).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(8).await.unwrap();
    ack(&*consumer, [&fetched[7], &fetched[0], &fetched[1], &fetched[4]]).await;
    consumer.close().await.unwrap();
    database.close().await;

    let log = file.open().await;
    publish(&log, [record("orders", 10)]).await;
    let consumer = join(&log, "orders").await;
    assert_eq!(offsets(&consumer.fetch(100).await.unwrap()), [2, 3, 5, 6, 8, 9, 10]);
    assert!(consumer.fetch(100).await.unwrap().is_empty());
}

#[tokio::test]
async fn voided_leases_are_free_for_the_consumers_of_every_process() {
    let file = File::new(2, LONG);
    let killed = file.open().await;
    publish(&killed, (0..4).map(|number| record("orders", number))).await;
    let held = join(&killed, "orders").await;
    let fetched = held.fetch(10).await.unwrap();

    let log = file.open().await;
    let consumer = join(&log, "orders").await;
    assert!(consumer.fetch(10).await.unwrap().is_empty());
    log.store().void_leases().await.unwrap();
    log.leases_ended();
    assert_eq!(consumer.fetch(10).await.unwrap().len(), 4);
    assert_eq!(held.ack(&[&fetched[0].position]).await.unwrap(), [Settled::LostLease]);
}

#[tokio::test]
async fn a_lease_begun_before_the_clock_was_set_back_counts_as_ended() {
    let file = File::new(2, LONG);
    let (died, database) = (file.open().await, file.database().await);
    publish(&died, (0..4).map(|number| record("orders", number))).await;
    let held = join(&died, "orders").await;
    assert_eq!(held.fetch(10).await.unwrap().len(), 4);
    const SET_BACK: &str = "UPDATE log_group SET leased_until = leased_until + 3600000;
                            UPDATE log_member SET alive_until = alive_until + 3600000";
    database.write("set back", |connection| Box::pin(sqlx::raw_sql(SET_BACK).execute(connection))).await.unwrap();
    let log = file.open().await;
    assert_eq!(join(&log, "orders").await.fetch(10).await.unwrap().len(), 4, "taken over at once");
}

#[tokio::test]
async fn a_closed_consumer_does_not_make_others_wait_for_its_lease() {
    let file = File::new(3, LONG);
    let log = file.open().await;
    publish(&log, (0..6).map(|number| record("orders", number))).await;
    let (first, second) = (join(&log, "orders").await, join(&log, "orders").await);
    let fetched = first.fetch(10).await.unwrap();
    assert!(second.fetch(10).await.unwrap().is_empty());
    first.close().await.unwrap();
    assert_eq!(first.ack(&[&fetched[0].position]).await.unwrap(), [Settled::LostLease]);
    assert_eq!(second.fetch(10).await.unwrap().len(), 6);
}

#[tokio::test]
async fn a_completed_set_over_its_bound_pauses_the_partition_until_it_shrinks() {
    const PUBLISHED: usize = 101_000;
    let file = File::new(1, LONG);
    let log = file.open().await;
    for batch in 0..101 {
        publish(&log, (0..1_000).map(|number| record("holes", 1_000 * batch + number))).await;
    }
    publish(&log, [record("whole", 0)]).await;
    let consumer = log.subscribe("group", Topics::Prefix(String::new())).await.unwrap();
    let mut fetched = Vec::new();
    loop {
        let more = consumer.fetch(PUBLISHED).await.unwrap();
        if more.is_empty() {
            break;
        }
        fetched.extend(more);
    }
    let holes: Vec<_> = fetched.iter().filter(|fetched| &*fetched.position.topic == "holes").collect();
    // The records in flight could be acked in any order, so the partition pauses before their text can be too long.
    assert!((50_000..PUBLISHED).contains(&holes.len()), "{} records were read", holes.len());
    assert_eq!(fetched.len(), holes.len() + 1, "only one partition is paused");
    // Every second record is not acked, which makes the longest text of the completed set.
    ack(&*consumer, holes.iter().copied().filter(|fetched| fetched.position.offset % 2 == 1)).await;
    publish(&log, [record("whole", 1)]).await;
    let others = consumer.fetch(1_000).await.unwrap();
    assert!(others.len() == 1 && &*others[0].position.topic == "whole", "the other partition is read");
    assert!(consumer.fetch(1_000).await.unwrap().is_empty());

    ack(&*consumer, holes.iter().copied().filter(|fetched| fetched.position.offset % 2 == 0).take(5_000)).await;
    let rest = consumer.fetch(1_000).await.unwrap();
    assert!(
        !rest.is_empty() && rest.iter().all(|fetched| fetched.position.offset >= holes.len() as i64),
        "the partition is read again"
    );

    // The pause is a property of the partition, so the next consumer pauses it, too.
    ack(&*consumer, rest.iter().filter(|fetched| fetched.position.offset % 2 == 1)).await;
    consumer.close().await.unwrap();
    let consumer = join(&log, "holes").await;
    let again = consumer.fetch(10).await.unwrap();
    assert_eq!(offsets(&again), (10_000..10_010).step_by(2).collect::<Vec<_>>(), "unacked records are read again");
    // Fewer than the limit, because the others were done. There are more records, so the consumer is woken.
    tokio::time::timeout(LONG, consumer.wakeup().signalled()).await.unwrap();
}

#[tokio::test]
async fn large_values_are_read_whole_in_several_fetches() {
    let file = File::new(1, LONG);
    let log = file.open().await;
    let value = |number: u8| Bytes::from(vec![number; 1 << 20]);
    publish(&log, (0..20).map(|number| Record { value: value(number), ..record("orders", number.into()) })).await;
    let consumer = join(&log, "orders").await;
    let first = consumer.fetch(100).await.unwrap();
    assert!((1..20).contains(&first.len()), "{} MiB in one fetch", first.len());
    // Fewer than the limit, but there are more records, so the consumer is woken.
    tokio::time::timeout(LONG, consumer.wakeup().signalled()).await.unwrap();
    let rest = consumer.fetch(100).await.unwrap();
    for (number, fetched) in first.iter().chain(&rest).enumerate() {
        assert!(fetched.value == value(number as u8), "value {number} differs");
    }
    assert_eq!(first.len() + rest.len(), 20);
}

#[tokio::test]
async fn headers_and_arbitrary_bytes_are_read_unchanged() {
    let file = File::new(1, LONG);
    let log = file.open().await;
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let odd = Record {
        headers: vec![pair("b", "2"), pair("a", "\"quoted\" \\ \n é 漢 \u{1F600}"), pair("b", "again"), pair("", "")],
        value: Bytes::from((0..=255).collect::<Vec<u8>>()),
        ..record("orders", 0)
    };
    let empty = Record { value: Bytes::new(), ..record("orders", 1) };
    publish(&log, [odd.clone(), empty.clone()]).await;
    let fetched = join(&log, "orders").await.fetch(10).await.unwrap();
    for (fetched, published) in fetched.iter().zip([odd, empty]) {
        assert_eq!((&fetched.key, &fetched.value), (&published.key, &published.value));
        assert_eq!(fetched.headers, published.headers);
    }
    assert_eq!(fetched.len(), 2);
}

#[tokio::test]
async fn a_topic_keeps_its_number_of_partitions() {
    let file = File::new(3, LONG);
    publish(&file.open().await, (0..30).map(|number| record("orders", number))).await;
    let wider = Log::new(
        LogTables::new(file.database().await),
        LogOptions { partitions: 8, lease: LONG, ..LogOptions::default() },
    );
    publish(&wider, (30..60).map(|number| record("orders", number))).await;
    publish(&wider, [record("payments", 0)]).await;
    let topics = wider.store().topics().await.unwrap();
    let partitions = |topic: &str| topics.iter().filter(|state| state.topic == topic).count();
    assert_eq!((partitions("orders"), partitions("payments")), (3, 8));
    assert!(topics.iter().filter(|state| state.topic == "orders").all(|state| state.next_offset == 20));
}

#[tokio::test]
async fn a_busy_topic_does_not_starve_other_topics() {
    let file = File::new(1, LONG);
    let log = file.open().await;
    publish(&log, (0..1_000).map(|number| record("busy", number))).await;
    publish(&log, ["a", "b", "z"].map(|topic| record(topic, 0))).await;
    let consumer = log.subscribe("group", Topics::Prefix(String::new())).await.unwrap();
    let mut topics = std::collections::BTreeSet::<Arc<str>>::new();
    for _ in 0..2 {
        topics.extend(consumer.fetch(50).await.unwrap().into_iter().map(|fetched| fetched.position.topic));
    }
    assert_eq!(topics.len(), 4, "{topics:?}");
}

#[tokio::test]
async fn young_leases_are_renewed_without_a_write() {
    let file = File::new(2, LONG);
    let database = file.database().await;
    let log = Log::new(LogTables::new(database.clone()), file.options.clone());
    publish(&log, (0..4).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(10).await.unwrap();
    const MARK: &str = "UPDATE log_group SET leased_until = 7";
    database.write("mark the leases", |connection| Box::pin(sqlx::query(MARK).execute(connection))).await.unwrap();
    let mut positions: Vec<Position> = fetched.iter().map(|fetched| fetched.position.clone()).collect();
    positions[1].generation -= 1;
    let renewed = consumer.renew(&positions.iter().collect::<Vec<_>>()).await.unwrap();
    use Settled::{Applied, LostLease};
    assert_eq!(renewed, [Applied, LostLease, Applied, Applied]);
    let untouched: i64 = sqlx::query_scalar("SELECT count(*) FROM log_group WHERE leased_until = 7")
        .fetch_one(database.readers())
        .await
        .unwrap();
    assert_eq!(untouched, 2);
}

#[tokio::test]
async fn a_group_starts_at_the_earliest_record_that_retention_kept() {
    let file = File::new(1, LONG);
    let database = file.database().await;
    let log = Log::new(LogTables::new(database.clone()), file.options.clone());
    publish(&log, (0..5).flat_map(|number| [record("some", number), record("none", number)])).await;
    const PURGE: &str = "DELETE FROM log_record WHERE \"offset\" < 2
        OR partition_id = (SELECT id FROM log_partition WHERE topic = 'none')";
    database.write("purge", |connection| Box::pin(sqlx::query(PURGE).execute(connection))).await.unwrap();
    let consumer = log.subscribe("group", Topics::Prefix(String::new())).await.unwrap();
    publish(&log, [record("none", 5)]).await;
    let fetched = consumer.fetch(10).await.unwrap();
    assert_eq!(fetched.len(), 4);
    ack(&*consumer, &fetched).await;
    for state in log.store().topics().await.unwrap() {
        assert_eq!(state.groups, [("group".to_owned(), state.next_offset)], "every record is done");
    }
}

#[tokio::test]
async fn a_failing_append_returns_its_error_for_every_record() {
    let file = File::new(1, LONG);
    let database = file.database().await;
    let log = Log::new(LogTables::new(database.clone()), file.options.clone());
    publish(&log, [record("orders", 0)]).await;
    database.close().await;
    let results = log.publish(vec![record("orders", 1), record("orders", 2)]).await;
    assert_eq!(results.len(), 2);
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    assert!(errors.iter().all(|error| matches!(error, PublishError::Unavailable(_))), "{errors:?}");
}

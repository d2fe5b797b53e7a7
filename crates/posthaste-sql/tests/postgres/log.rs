//! The built-in bus on PostgreSQL: the laws of the bus, and tests of behaviour that only a server has.

mod operators;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_backend_tests::bus_laws::{BusHarness, LEASE};
use posthaste_backend_tests::hub_laws::bus_inspector::{InspectedBus, InspectorHarness};
use posthaste_backend_tests::servers::{self, Cutter};
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, PublishError, Record, Topics};
use posthaste_core::hub_store::{BusInspector, ResetTo};
use posthaste_core::log::{LogOptions, LogStore};
use posthaste_sql::postgres::{Log, LogTables, migrate_hub};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// One database; every log on it has a pool of its own, as another process would.
struct Server {
    url: String,
    pool: PgPool,
    options: LogOptions,
}

impl Server {
    async fn start(partitions: u32, lease: Duration) -> Self {
        let url = servers::postgres().await;
        let options = LogOptions { partitions, lease, ..LogOptions::default() };
        let pool = pool(&url).await;
        migrate_hub(&pool).await.unwrap();
        Self { url, pool, options }
    }

    /// Runs plain SQL as an operator would.
    async fn execute(&self, sql: &'static str) {
        sqlx::raw_sql(sql).execute(&self.pool).await.unwrap();
    }

    async fn ask(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }
}

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(4).connect(url).await.unwrap()
}

#[async_trait]
impl BusHarness for Server {
    type Bus = Log;

    async fn open_with(&self, lease: Duration) -> Log {
        let options = LogOptions { lease, ..self.options.clone() };
        Log::new(LogTables::new(pool(&self.url).await), options)
    }

    async fn open(&self) -> Log {
        self.open_with(self.options.lease).await
    }

    async fn remove_below(&self, topic: &str, offset: i64) {
        const REMOVE: &str = "DELETE FROM log_record WHERE \"offset\" < $1
            AND partition_id IN (SELECT id FROM log_partition WHERE topic = $2)";
        sqlx::query(REMOVE).bind(offset).bind(topic).execute(&self.pool).await.unwrap();
    }

    async fn reset(&self, group: &str, topic: &str) {
        LogTables::new(self.pool.clone()).reset(group, topic, None, ResetTo::Earliest).await.unwrap();
    }

    fn max_completed_text(&self) -> usize {
        posthaste_core::log::MAX_COMPLETED_TEXT
    }
}

#[async_trait]
impl InspectorHarness for Server {
    async fn open_bus(&self) -> InspectedBus {
        let log = self.open().await;
        let inspector = Arc::new(log.store().clone());
        InspectedBus { bus: Arc::new(log), inspector }
    }
}

mod with_one_partition {
    posthaste_backend_tests::bus_laws!(super::Server::start(1, super::LEASE).await);
    posthaste_backend_tests::bus_inspector_laws!(super::Server::start(1, super::LONG).await);
}

mod with_four_partitions {
    posthaste_backend_tests::bus_laws!(super::Server::start(4, super::LEASE).await);
    posthaste_backend_tests::bus_inspector_laws!(super::Server::start(4, super::LONG).await);
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

fn positions(fetched: &[Fetched]) -> Vec<&Position> {
    fetched.iter().map(|fetched| &fetched.position).collect()
}

/// Records in the order in which a reader got them. It checks that no partition has a gap or a record that comes late.
#[derive(Default)]
struct InOrder {
    partitions: BTreeMap<(Arc<str>, u32), i64>,
    keys: BTreeMap<String, u32>,
}

impl InOrder {
    fn add(&mut self, fetched: &[Fetched]) {
        for Fetched { position, key, .. } in fetched {
            let next = self.partitions.entry((Arc::clone(&position.topic), position.partition)).or_default();
            assert_eq!(position.offset, *next, "a gap, a late record or a repeated one: {position:?}");
            *next += 1;
            *self.keys.entry(key.clone()).or_default() += 1;
        }
    }

    fn count(&self) -> i64 {
        self.partitions.values().sum()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_on_many_nodes_append_without_gaps_and_in_order() {
    const NODES: u64 = 4;
    const WRITERS: u64 = 3;
    const BATCHES: u64 = 20;
    const BATCH: u64 = 30;
    let server = Server::start(3, LONG).await;
    let reader = server.open().await.subscribe("group", Topics::Prefix("t".to_owned())).await.unwrap();
    let mut writers = JoinSet::new();
    for node in 0..NODES {
        let log = server.open().await;
        for writer in 0..WRITERS {
            let log = log.clone();
            writers.spawn(async move {
                for batch in 0..BATCHES {
                    // Every batch has three topics of three partitions, in an order of its own.
                    let number = |n: u64| (n + node + writer + batch) % BATCH;
                    let record = |n: u64| Record {
                        key: format!("{node} {writer} {batch} {n}"),
                        ..record(&format!("t{}", number(n) % 3), number(n) / 3)
                    };
                    publish(&log, (0..BATCH).map(record)).await;
                }
            });
        }
    }
    let total = (NODES * WRITERS * BATCHES * BATCH) as i64;
    let (mut during, deadline) = (InOrder::default(), Instant::now() + LONG);
    while during.count() < total {
        assert!(Instant::now() < deadline, "{} of {total} records came", during.count());
        let fetched = reader.fetch(500).await.unwrap();
        if fetched.is_empty() {
            // A notification wakes the reader. Without one it polls.
            _ = timeout(Duration::from_millis(500), reader.wakeup().signalled()).await;
        }
        during.add(&fetched);
    }
    while let Some(writer) = writers.join_next().await {
        writer.unwrap();
    }
    assert!(during.keys.values().all(|&count| count == 1));
    assert_eq!(during.keys.len() as i64, total);
    assert_eq!(server.ask("SELECT sum(next_offset)::bigint FROM log_partition").await, total);
    assert_eq!(server.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").await, 0);
}

/// Ends every connection to the database except the one that does so.
const CUT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connections_in_the_middle_of_appends_and_reads_lose_nothing() {
    const BATCHES: u64 = 60;
    const BATCH: u64 = 20;
    const WRITERS: u64 = 3;
    let server = Server::start(4, LONG).await;
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let log = server.open().await;
        writers.spawn(async move {
            for batch in 0..BATCHES {
                let record = |n| Record { key: format!("{writer} {batch} {n}"), ..record("orders", n) };
                let deadline = Instant::now() + LONG;
                // As a relay does: a batch that was not accepted is published again.
                while log.publish((0..BATCH).map(record).collect()).await.iter().any(Result::is_err) {
                    assert!(Instant::now() < deadline, "the batch was never accepted");
                }
            }
        });
    }
    let log = server.open().await;
    let reader = join(&log, "orders").await;
    let (mut seen, mut cuts, deadline) = (InOrder::default(), 0, Instant::now() + LONG);
    let expected = (WRITERS * BATCHES * BATCH) as usize;
    while seen.keys.len() < expected {
        assert!(Instant::now() < deadline, "{} of {expected} records came", seen.keys.len());
        // Ten times, each after a part of the records came.
        if cuts < 10 && seen.keys.len() > cuts * expected / 12 {
            cuts += 1;
            let mut operator = <sqlx::PgConnection as sqlx::Connection>::connect(&server.url).await.unwrap();
            sqlx::raw_sql(CUT).execute(&mut operator).await.unwrap();
        }
        let Ok(fetched) = reader.fetch(50).await else { continue };
        seen.add(&fetched);
        let deadline = Instant::now() + LONG;
        while reader.ack(&positions(&fetched)).await.is_err() {
            assert!(Instant::now() < deadline, "the acks were never recorded");
        }
        if fetched.is_empty() {
            _ = timeout(Duration::from_millis(100), reader.wakeup().signalled()).await;
        }
    }
    assert_eq!(cuts, 10);
    while let Some(writer) = writers.join_next().await {
        writer.unwrap();
    }
}

/// A firewall that drops packets leaves connections open that never answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_hangs_is_given_up() {
    let server = Server::start(1, LONG).await;
    let cutter = Cutter::to(&server.url).await;
    let one = PgPoolOptions::new().max_connections(1).connect(cutter.url()).await.unwrap();
    let log = Log::new(LogTables::new(one), server.options.clone());
    publish(&log, (0..3).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(10).await.unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        // A publish that opens a new connection succeeds. Then that one hangs, too.
        cutter.stall();
        let results = timeout(LONG, log.publish(vec![record("orders", 3)])).await.expect("it is given up");
        match &results[..] {
            [Err(PublishError::Unavailable(_))] => break,
            [Ok(())] => assert!(Instant::now() < deadline, "no publish uses a connection that hangs"),
            results => panic!("{results:?}"),
        }
    }
    // The pool opens a new connection. The connection for leases hangs, too, and is given up.
    let deadline = Instant::now() + LONG;
    while timeout(LONG, log.publish(vec![record("orders", 4)])).await.unwrap()[0].is_err() {
        assert!(Instant::now() < deadline, "no append succeeds");
    }
    while timeout(LONG, consumer.close()).await.unwrap().is_err() {
        assert!(Instant::now() < deadline, "the consumer cannot leave");
    }
    assert_eq!(consumer.ack(&positions(&fetched)).await.unwrap(), vec![Settled::LostLease; 3]);
    assert!(join(&log, "orders").await.fetch(10).await.unwrap().len() >= 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_append_wakes_the_readers_of_other_processes_also_after_a_lost_connection() {
    let server = Server::start(1, LONG).await;
    let (here, there) = (server.open().await, server.open().await);
    publish(&here, [record("orders", 0), record("others", 0)]).await;
    let reader = join(&there, "orders").await;
    const CUT_LISTENER: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND query ILIKE 'LISTEN%'";
    let listening = || async {
        const LISTENERS: &str = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND query ILIKE 'LISTEN%posthaste_log%'";
        let deadline = Instant::now() + LONG;
        while server.ask(LISTENERS).await != 1 {
            assert!(Instant::now() < deadline, "no connection listens");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // One connection for all consumers of a log.
    let _other = there.subscribe("other", Topics::Prefix("x".to_owned())).await.unwrap();
    for number in 1..=2 {
        listening().await;
        // The reader is woken when the listener begins. Later signals come from appends.
        while timeout(Duration::from_secs(1), reader.wakeup().signalled()).await.is_ok() {}
        publish(&here, [record("orders", number)]).await;
        timeout(LONG, reader.wakeup().signalled()).await.expect("woken by the append of another process");
        server.execute(CUT_LISTENER).await;
    }
    listening().await;
    assert_eq!(offsets(&reader.fetch(10).await.unwrap()), [0, 1, 2]);
}

#[tokio::test]
async fn a_record_that_postgres_cannot_store_is_refused_alone() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    let odd_header = ("na\0me".to_owned(), "val\0ue".to_owned());
    let records = vec![
        record("orders", 0),
        Record { key: "a\0b".to_owned(), ..record("orders", 1) },
        Record { topic: "or\0ders".into(), ..record("orders", 2) },
        Record { topic: "t".repeat(3_000).into(), ..record("orders", 3) },
        Record { key: "k".repeat(10_000), ..record("orders", 4) },
        Record { headers: vec![odd_header.clone()], value: Bytes::from_static(b"\0"), ..record("orders", 5) },
    ];
    let results = log.publish(records).await;
    let is_refused = results.iter().map(|result| matches!(result, Err(PublishError::Refused { .. })));
    assert_eq!(is_refused.collect::<Vec<_>>(), [false, true, true, true, false, false], "{results:?}");
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 3);
    let fetched = join(&log, "orders").await.fetch(10).await.unwrap();
    assert_eq!(fetched.iter().map(|fetched| fetched.key.len()).collect::<Vec<_>>(), [5, 10_000, 5]);
    assert_eq!((&fetched[2].headers, &fetched[2].value[..]), (&vec![odd_header], &b"\0"[..]));
    let inspector = log.store();
    assert_eq!(inspector.records_of(&"k".repeat(10_000)).await.unwrap().len(), 1);
    assert!(inspector.records_of(&"k".repeat(9_999)).await.unwrap().is_empty(), "another key with the same beginning");
    assert!(inspector.records_of("a\0b").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_large_append_is_one_transaction() {
    let server = Server::start(2, LONG).await;
    let log = server.open().await;
    publish(&log, (0..1_700).map(|number| record("orders", number))).await;
    assert_eq!(server.ask("SELECT count(DISTINCT xmin::text) FROM log_record").await, 1);
    let value = |number: u64| Bytes::from(vec![number as u8; 1 << 20]);
    publish(&log, (0..20).map(|number| Record { value: value(number), ..record("large", 0) })).await;
    let consumer = join(&log, "large").await;
    let first = consumer.fetch(100).await.unwrap();
    assert!((1..20).contains(&first.len()), "{} MiB in one fetch", first.len());
    // Fewer than the limit, but there are more records, so the consumer is woken.
    timeout(LONG, consumer.wakeup().signalled()).await.unwrap();
    let rest = consumer.fetch(100).await.unwrap();
    for (number, fetched) in first.iter().chain(&rest).enumerate() {
        assert!(fetched.value == value(number as u64), "value {number} differs");
    }
    assert_eq!(first.len() + rest.len(), 20);
}

#[tokio::test]
async fn an_append_to_a_partition_that_does_not_exist_appends_nothing() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    publish(&log, [record("orders", 0), record("gone", 0)]).await;
    server.execute("DELETE FROM log_record; DELETE FROM log_partition WHERE topic = 'gone'").await;
    let results = log.publish(vec![record("orders", 1), record("gone", 1)]).await;
    assert!(results.iter().all(|result| matches!(result, Err(PublishError::Unavailable(_)))), "{results:?}");
    assert_eq!(server.ask("SELECT count(*) FROM log_record").await, 0);
    assert_eq!(server.ask("SELECT next_offset FROM log_partition").await, 1);
}

#[tokio::test]
async fn processes_that_create_a_topic_together_make_one_set_of_partitions() {
    let server = Server::start(1, LONG).await;
    let mut creations = JoinSet::new();
    for partitions in 1..=6 {
        let tables = LogTables::new(pool(&server.url).await);
        let names = |reversed: bool| match reversed {
            true => vec!["b".to_owned(), "a".to_owned()],
            false => vec!["a".to_owned(), "b".to_owned()],
        };
        creations.spawn(async move { tables.create_topics(names(partitions % 2 == 0), partitions).await.unwrap() });
    }
    let created = creations.join_all().await;
    assert!(created.iter().all(|topics| *topics == created[0]), "{created:?}");
    assert_eq!(created[0][0].1.len(), created[0][1].1.len());
}

#[tokio::test]
async fn a_lease_begun_before_the_clock_was_set_back_counts_as_ended() {
    let server = Server::start(2, LONG).await;
    let died = server.open().await;
    publish(&died, (0..4).map(|number| record("orders", number))).await;
    let held = join(&died, "orders").await;
    assert_eq!(held.fetch(10).await.unwrap().len(), 4);
    server
        .execute(
            "UPDATE log_group SET leased_until = leased_until + interval '1 hour';
             UPDATE log_member SET alive_until = alive_until + interval '1 hour'",
        )
        .await;
    let log = server.open().await;
    assert_eq!(join(&log, "orders").await.fetch(10).await.unwrap().len(), 4, "taken over at once");
}

/// Consumers of one group join, renew, ack and leave at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_a_group_neither_share_a_partition_nor_deadlock() {
    const MEMBERS: usize = 6;
    let server = Server::start(12, LONG).await;
    publish(&server.open().await, (0..1_200).map(|number| record("orders", number))).await;
    let mut members = JoinSet::new();
    for _ in 0..MEMBERS {
        let log = server.open().await;
        members.spawn(async move {
            let mut done = 0;
            for _ in 0..5 {
                let consumer = join(&log, "orders").await;
                for _ in 0..10 {
                    let fetched = consumer.fetch(5).await.unwrap();
                    let acked = consumer.ack(&positions(&fetched)).await.unwrap();
                    // Nothing is lost: no lease ends, and a partition that goes to another member is revoked first.
                    assert_eq!(acked, vec![Settled::Applied; fetched.len()]);
                    done += fetched.len();
                }
                consumer.close().await.unwrap();
            }
            done
        });
    }
    let done: usize = members.join_all().await.into_iter().sum();
    let log = server.open().await;
    let consumer = join(&log, "orders").await;
    let mut rest = 0;
    loop {
        let fetched = consumer.fetch(500).await.unwrap();
        if fetched.is_empty() {
            break;
        }
        rest += fetched.len();
    }
    assert_eq!(done + rest, 1_200, "every record was done once");
    assert_eq!(server.ask("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").await, 0);
}

#[tokio::test]
async fn a_look_writes_nothing_and_young_leases_are_not_renewed() {
    let server = Server::start(2, LONG).await;
    let log = server.open().await;
    publish(&log, (0..4).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(10).await.unwrap();
    const VERSION: &str = "SELECT sum(xmin::text::bigint)::bigint FROM log_group";
    let before = server.ask(VERSION).await;
    let mut positions: Vec<Position> = fetched.iter().map(|fetched| fetched.position.clone()).collect();
    positions[1].generation -= 1;
    let renewed = consumer.renew(&positions.iter().collect::<Vec<_>>()).await.unwrap();
    use Settled::{Applied, LostLease};
    assert_eq!(renewed, [Applied, LostLease, Applied, Applied]);
    let member = posthaste_core::log::Member {
        group: "group".to_owned(),
        owner: "other".to_owned(),
        topics: Topics::Prefix("ord".to_owned()),
    };
    let look = log.store().look(&member, LONG).await.unwrap();
    assert_eq!((look.has_free, look.members, look.partitions), (false, 1, 2));
    assert_eq!(server.ask(VERSION).await, before);
}

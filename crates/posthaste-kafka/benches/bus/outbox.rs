//! From the outbox table of a hub on PostgreSQL to Kafka, as framed Protobuf, beside the slower of two plain programs:
//! one that claims the rows, and one that produces records of the same size.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthaste_backend_tests::report::{Aim, Report, Rounds};
use posthaste_backend_tests::servers::{Kafka, Postgres};
use posthaste_hub::{ExternalBus, Hub, Parts, Sealer, Settings};
use posthaste_kafka::{KafkaBus, KafkaOptions};
use posthaste_sql::postgres::HubDatabase;
use posthaste_webhook::{Client, ClientOptions};
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use sqlx::postgres::{PgPool, PgPoolOptions};

use crate::{BATCH, PARTITIONS, ROUNDS, VALUE, kafka_publish};

const EVENTS: i64 = 100_000;
const NAME: &str = "outbox to kafka";

pub async fn run(report: &mut Report) {
    if !report.wants(NAME) {
        return;
    }
    report.saying(NAME);
    let database = Postgres::start_with("-c fsync=on -c synchronous_commit=on -c max_wal_size=4GB").await;
    let kafka = Kafka::start().await;
    let pool = PgPoolOptions::new().max_connections(4).connect(database.url()).await.expect("it connects");
    let (folder, next) = (tempfile::tempdir().expect("a folder"), std::cell::Cell::new(0));
    let ours = async || {
        next.set(next.get() + 1);
        let prefix = format!("bench{}", next.get());
        let hub = start(database.url(), kafka.url(), &prefix, folder.path()).await;
        hub.stop().await;
        fill(&pool).await;
        let started = Instant::now();
        let hub = start(database.url(), kafka.url(), &prefix, folder.path()).await;
        wait_for_records(kafka.url(), &format!("{prefix}.events.bench.happened")).await;
        let took = started.elapsed();
        hub.stop().await;
        EVENTS as f64 / took.as_secs_f64()
    };
    let raw = async || {
        // The hub has created the table.
        let hub = start(database.url(), kafka.url(), "raw", folder.path()).await;
        hub.stop().await;
        fill(&pool).await;
        let (claimed, produced) = (claim(&pool).await, kafka_publish(kafka.url()).await.0);
        eprintln!("  plain claims {claimed:.0}/s, plain producer {produced:.0}/s");
        claimed.min(produced)
    };
    let rounds = Rounds::measure(ROUNDS, ours, raw).await;
    report.ratio(NAME, rounds, "events/s", Some(Aim::AtLeast(0.7)));
}

/// A server on this database and this cluster.
async fn start(database: &str, broker: &str, prefix: &str, folder: &std::path::Path) -> Arc<Hub> {
    let options = KafkaOptions {
        brokers: vec![broker.to_owned()],
        topic_prefix: prefix.to_owned(),
        partitions: PARTITIONS,
        replication: 1,
        ..KafkaOptions::default()
    };
    let bus = KafkaBus::new(options).expect("a client");
    let mut settings = Settings::default();
    settings.bus.topic_prefix = prefix.to_owned();
    let parts = Parts {
        database: Arc::new(HubDatabase::open(database, 30).await.expect("it connects")),
        bus: Some(ExternalBus { bus: Arc::new(bus.clone()), inspector: Arc::new(bus) }),
        registry: None,
        channel_buses: Default::default(),
        sources: Vec::new(),
        roles: Default::default(),
        client: Client::new(ClientOptions::default()),
        sealer: Sealer::open(&folder.join("key")).expect("a key"),
        settings,
    };
    Hub::start(parts).await.expect("it starts")
}

/// A table with nothing but new events.
async fn fill(pool: &PgPool) {
    const FILL: &str = "INSERT INTO outbox_event (event_type, source_service, payload)
        SELECT 'bench.happened', 'bench', '{\"number\":' || number || ',\"text\":\"' || repeat('x', $2) || '\"}'
        FROM generate_series(1, $1) AS number";
    sqlx::raw_sql("TRUNCATE outbox_event").execute(pool).await.expect("it is emptied");
    sqlx::query(FILL).bind(EVENTS).bind(VALUE as i32).execute(pool).await.expect("it is filled");
    sqlx::raw_sql("VACUUM ANALYZE outbox_event").execute(pool).await.expect("it is analysed");
}

/// Claims and settles all rows in batches, as the plainest reader of the table would; events per second.
async fn claim(pool: &PgPool) -> f64 {
    const CLAIM: &str = "SELECT seq, event_id, event_type, payload FROM outbox_event WHERE status = 0
        ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED";
    let (started, mut done) = (Instant::now(), 0);
    while done < EVENTS {
        let mut work = pool.begin().await.expect("it begins");
        let rows: Vec<(i64, String, String, String)> =
            sqlx::query_as(CLAIM).bind(BATCH as i64).fetch_all(&mut *work).await.expect("it claims");
        let numbers: Vec<i64> = rows.iter().map(|(seq, ..)| *seq).collect();
        let settle = sqlx::query("UPDATE outbox_event SET status = 1, done_at = now() WHERE seq = ANY ($1)");
        settle.bind(&numbers).execute(&mut *work).await.expect("it settles");
        work.commit().await.expect("it commits");
        done += rows.len() as i64;
    }
    EVENTS as f64 / started.elapsed().as_secs_f64()
}

/// Waits until the topic has all events.
async fn wait_for_records(broker: &str, topic: &str) {
    let (broker, topic) = (broker.to_owned(), topic.to_owned());
    let waiting = tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = ClientConfig::new().set("bootstrap.servers", broker).create().expect("a client");
        let records = || {
            let of = |partition| client.fetch_watermarks(&topic, partition, Duration::from_secs(5));
            (0..PARTITIONS as i32).filter_map(|partition| of(partition).ok()).map(|(_, next)| next).sum::<i64>()
        };
        while records() < EVENTS {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    waiting.await.expect("it waits");
}

//! The throughput of each bus on this machine, beside a plain client in the same run: `cargo bench -p posthaste-kafka`.
//! Names of figures as arguments select some of them.
//!
//! It prints one JSON object to stdout and a table for people to stderr. It starts a Kafka and a PostgreSQL of its own,
//! both durable, and removes them at the end.

mod ingest;
mod outbox;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use posthaste_backend_tests::report::{Aim, Report, Rounds};
use posthaste_backend_tests::servers::{Kafka, Postgres};
use posthaste_core::bus::{Bus, Position, Record, Topics};
use posthaste_core::log::LogOptions;
use posthaste_kafka::{KafkaBus, KafkaOptions};
use posthaste_sql::{postgres, sqlite};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientConfig, ClientContext};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous};

const BATCH: usize = 500;
/// How many publishes are in flight at once.
const PUBLISHERS: usize = 4;
const PARTITIONS: u32 = 6;
const VALUE: usize = 500;
const KAFKA_RECORDS: usize = 200_000;
const SQL_RECORDS: usize = 60_000;
const ROUNDS: usize = 3;

#[tokio::main]
async fn main() {
    // `cargo bench` passes --bench.
    let request: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let mut report = Report::new(request);
    on_kafka(&mut report).await;
    on_postgres(&mut report).await;
    on_sqlite(&mut report).await;
    ingest::run(&mut report).await;
    outbox::run(&mut report).await;
    report.print();
}

fn value() -> Bytes {
    // JSON compresses, but not to nothing.
    let mut text = String::new();
    while text.len() < VALUE {
        text.push_str(&format!("\"field\":{},", fastrand::u64(..)));
    }
    text.truncate(VALUE);
    text.into()
}

fn key(number: usize) -> String {
    format!("key-{number:020}")
}

fn record(topic: &Arc<str>, number: usize, value: &Bytes) -> Record {
    let (key, value) = (key(number), value.clone());
    Record { topic: Arc::clone(topic), route: number as u64, key, value, headers: Vec::new() }
}

fn new_topic() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    format!("bench.topic-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Calls `write` with the first number of each batch, several at once; records per second.
async fn in_batches<F>(records: usize, write: impl Fn(usize) -> F + Clone + Send + Sync + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut writers = Vec::new();
    for _ in 0..PUBLISHERS {
        let (write, next) = (write.clone(), Arc::clone(&next));
        writers.push(tokio::spawn(async move {
            loop {
                let first = next.fetch_add(BATCH as u64, Ordering::Relaxed) as usize;
                if first >= records {
                    return;
                }
                write(first).await;
            }
        }));
    }
    for writer in writers {
        writer.await.expect("it writes");
    }
    records as f64 / started.elapsed().as_secs_f64()
}

async fn publish(bus: &(impl Bus + Clone), topic: &str, records: usize) -> f64 {
    let (topic, value): (Arc<str>, Bytes) = (topic.into(), value());
    // The topic is created before.
    publish_batch(bus, vec![record(&topic, 0, &value)]).await;
    let bus = bus.clone();
    in_batches(records, move |first| {
        let batch = (first..first + BATCH).map(|number| record(&topic, number, &value)).collect();
        let bus = bus.clone();
        async move { publish_batch(&bus, batch).await }
    })
    .await
}

async fn publish_batch(bus: &impl Bus, batch: Vec<Record>) {
    bus.publish(batch).await.into_iter().for_each(|published| published.expect("it is published"));
}

/// Reads and acks everything; records per second from the first record on.
async fn consume(bus: &impl Bus, topic: &str, records: usize) -> f64 {
    let consumer = bus.subscribe("bench", Topics::Named(vec![topic.to_owned()])).await.expect("it joins");
    let (mut started, mut done) = (None, 0);
    while done < records {
        let fetched = consumer.fetch(BATCH).await.expect("it reads");
        if fetched.is_empty() {
            // The wake-up may have been for records that were fetched already.
            let _ = tokio::time::timeout(Duration::from_millis(20), consumer.wakeup().signalled()).await;
            continue;
        }
        started.get_or_insert_with(Instant::now);
        let positions: Vec<&Position> = fetched.iter().map(|fetched| &fetched.position).collect();
        consumer.ack(&positions).await.expect("it acks");
        done += fetched.len();
    }
    consumer.flush().await.expect("the acks are durable");
    let took = started.expect("there are records").elapsed();
    consumer.close().await.expect("it leaves");
    done as f64 / took.as_secs_f64()
}

/// Measures a bus beside a plain client.
async fn measure<B: Bus + Clone>(
    report: &mut Report,
    name: &str,
    bus: &B,
    records: usize,
    raw_publish: impl AsyncFn() -> f64,
    raw_consume: impl AsyncFn() -> f64,
) {
    let publishing = format!("{name} publish");
    if report.wants(&publishing) {
        report.saying(&publishing);
        let ours = async || publish(bus, &new_topic(), records).await;
        let rounds = Rounds::measure(ROUNDS, ours, raw_publish).await;
        report.ratio(&publishing, rounds, "records/s", Some(Aim::AtLeast(0.5)));
    }
    let consuming = format!("{name} consume");
    if report.wants(&consuming) {
        report.saying(&consuming);
        let ours = async || {
            let topic = new_topic();
            publish(bus, &topic, records).await;
            consume(bus, &topic, records).await
        };
        let rounds = Rounds::measure(ROUNDS, ours, raw_consume).await;
        report.ratio(&consuming, rounds, "records/s", Some(Aim::AtLeast(0.5)));
    }
}

fn wants(report: &Report, name: &str) -> bool {
    report.wants(&format!("{name} publish")) || report.wants(&format!("{name} consume"))
}

async fn on_kafka(report: &mut Report) {
    if !wants(report, "kafka") {
        return;
    }
    let server = Kafka::start().await;
    let broker = server.url();
    let options = KafkaOptions {
        brokers: vec![broker.to_owned()],
        topic_prefix: "bench".to_owned(),
        partitions: PARTITIONS,
        replication: 1,
        ..KafkaOptions::default()
    };
    let bus = KafkaBus::new(options).expect("a client");
    let raw_publish = async || kafka_publish(broker).await.0;
    let raw_consume = async || {
        let topic = kafka_publish(broker).await.1;
        kafka_consume(broker, &topic)
    };
    measure(report, "kafka", &bus, KAFKA_RECORDS, raw_publish, raw_consume).await;
}

/// Counts what is delivered.
struct Counter(AtomicU64);

impl ClientContext for Counter {}

impl ProducerContext for Counter {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        result.as_ref().expect("it is delivered");
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The plainest producer with the same settings; records per second, and the topic.
async fn kafka_publish(broker: &str) -> (f64, String) {
    let topic = new_topic();
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", broker);
    let admin: AdminClient<DefaultClientContext> = config.create().expect("a client");
    let new = NewTopic::new(&topic, PARTITIONS as i32, TopicReplication::Fixed(1));
    admin.create_topics([&new], &AdminOptions::new()).await.expect("it is created");
    config.set("acks", "all").set("enable.idempotence", "true").set("compression.type", "lz4");
    config.set("linger.ms", "2").set("batch.size", "1000000");
    let producer: ThreadedProducer<Counter> = config.create_with_context(Counter(AtomicU64::new(0))).expect("a client");
    let (value, started) = (value(), Instant::now());
    for number in 0..KAFKA_RECORDS {
        let (key, partition) = (key(number), number as i32 % PARTITIONS as i32);
        let mut record = BaseRecord::to(&topic).key(&key).payload(&value[..]).partition(partition);
        while let Err((_, back)) = producer.send(record) {
            record = back;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    producer.flush(Duration::from_secs(60)).expect("everything is sent");
    while producer.context().0.load(Ordering::Relaxed) < KAFKA_RECORDS as u64 {
        std::thread::sleep(Duration::from_millis(1));
    }
    (KAFKA_RECORDS as f64 / started.elapsed().as_secs_f64(), topic)
}

/// The plainest consumer that commits every 50 ms; records per second.
fn kafka_consume(broker: &str, topic: &str) -> f64 {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", broker).set("group.id", format!("raw-{topic}"));
    config.set("auto.offset.reset", "earliest").set("enable.auto.commit", "false").set("fetch.wait.max.ms", "100");
    let consumer: BaseConsumer = config.create().expect("a client");
    consumer.subscribe(&[topic]).expect("it joins");
    let (mut started, mut done, mut committed_at) = (None, 0, Instant::now());
    while done < KAFKA_RECORDS {
        let Some(message) = consumer.poll(Duration::from_millis(20)) else { continue };
        started.get_or_insert_with(Instant::now);
        std::hint::black_box(message.expect("it reads").detach());
        done += 1;
        if committed_at.elapsed() >= Duration::from_millis(50) {
            consumer.commit_consumer_state(CommitMode::Async).expect("it commits");
            committed_at = Instant::now();
        }
    }
    consumer.commit_consumer_state(CommitMode::Sync).expect("it commits");
    KAFKA_RECORDS as f64 / started.expect("there are records").elapsed().as_secs_f64()
}

async fn on_postgres(report: &mut Report) {
    if !wants(report, "postgres log") {
        return;
    }
    let server = Postgres::start_with("-c fsync=on -c synchronous_commit=on -c max_wal_size=4GB").await;
    let pool = PgPoolOptions::new().max_connections(10).connect(server.url()).await.expect("it connects");
    postgres::migrate_hub(&pool).await.expect("the tables are created");
    let table = "CREATE TABLE plain (id bigserial PRIMARY KEY, topic text, key text, value bytea);
         CREATE TABLE plain_position (at bigint); INSERT INTO plain_position VALUES (0)";
    sqlx::raw_sql(table).execute(&pool).await.expect("a table");
    let options = LogOptions { partitions: PARTITIONS, ..LogOptions::default() };
    let bus = postgres::Log::new(postgres::LogTables::new(pool.clone()), options);
    let raw_consume = async || {
        postgres_inserts(&pool).await;
        postgres_selects(&pool).await
    };
    measure(report, "postgres log", &bus, SQL_RECORDS, async || postgres_inserts(&pool).await, raw_consume).await;
}

/// Multi-row inserts into a table, several at once.
async fn postgres_inserts(pool: &PgPool) -> f64 {
    sqlx::raw_sql("TRUNCATE plain RESTART IDENTITY").execute(pool).await.expect("it is emptied");
    let (pool, value) = (pool.clone(), value().to_vec());
    in_batches(SQL_RECORDS, move |first| {
        let keys: Vec<String> = (first..first + BATCH).map(key).collect();
        let (pool, values) = (pool.clone(), vec![value.clone(); BATCH]);
        async move {
            let insert = "INSERT INTO plain (topic, key, value) SELECT 't', * FROM unnest($1::text[], $2::bytea[])";
            sqlx::query(insert).bind(keys).bind(values).execute(&pool).await.expect("it inserts");
        }
    })
    .await
}

/// Reads a batch and stores the position, one after the other.
async fn postgres_selects(pool: &PgPool) -> f64 {
    let (mut at, mut done, started) = (0, 0, Instant::now());
    while done < SQL_RECORDS {
        let read = "SELECT id, topic, key, value FROM plain WHERE id > $1 ORDER BY id LIMIT $2";
        let rows: Vec<(i64, String, String, Vec<u8>)> =
            sqlx::query_as(read).bind(at).bind(BATCH as i64).fetch_all(pool).await.expect("it reads");
        at = rows.last().expect("there are records").0;
        done += rows.len();
        sqlx::query("UPDATE plain_position SET at = $1").bind(at).execute(pool).await.expect("it is stored");
    }
    done as f64 / started.elapsed().as_secs_f64()
}

async fn on_sqlite(report: &mut Report) {
    if !wants(report, "sqlite log") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite://{}", folder.path().join("log.db").display());
    let database = sqlite::Database::open(&url).await.expect("it opens");
    database.migrate_hub().await.expect("the tables are created");
    let bus = sqlite::Log::new(sqlite::LogTables::new(database), LogOptions::default());
    let options = SqliteConnectOptions::new().filename(folder.path().join("plain.db")).create_if_missing(true);
    let options = options.journal_mode(SqliteJournalMode::Wal).synchronous(SqliteSynchronous::Full);
    let plain = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.expect("it opens");
    let table = "CREATE TABLE plain (id INTEGER PRIMARY KEY, topic TEXT, key TEXT, value BLOB);
         CREATE TABLE plain_position (at INTEGER); INSERT INTO plain_position VALUES (0)";
    sqlx::raw_sql(table).execute(&plain).await.expect("a table");
    let raw_consume = async || {
        sqlite_inserts(&plain).await;
        sqlite_selects(&plain).await
    };
    measure(report, "sqlite log", &bus, SQL_RECORDS, async || sqlite_inserts(&plain).await, raw_consume).await;
}

/// A transaction for each batch, one after the other: SQLite has one writer.
async fn sqlite_inserts(pool: &SqlitePool) -> f64 {
    sqlx::raw_sql("DELETE FROM plain").execute(pool).await.expect("it is emptied");
    let (value, started) = (value().to_vec(), Instant::now());
    for first in (0..SQL_RECORDS).step_by(BATCH) {
        let mut transaction = pool.begin().await.expect("it begins");
        for number in first..first + BATCH {
            let insert = sqlx::query("INSERT INTO plain (topic, key, value) VALUES ('t', ?, ?)");
            insert.bind(key(number)).bind(&value).execute(&mut *transaction).await.expect("it inserts");
        }
        transaction.commit().await.expect("it commits");
    }
    SQL_RECORDS as f64 / started.elapsed().as_secs_f64()
}

async fn sqlite_selects(pool: &SqlitePool) -> f64 {
    let (mut at, mut done, started) = (0, 0, Instant::now());
    while done < SQL_RECORDS {
        let read = "SELECT id, topic, key, value FROM plain WHERE id > ? ORDER BY id LIMIT ?";
        let rows: Vec<(i64, String, String, Vec<u8>)> =
            sqlx::query_as(read).bind(at).bind(BATCH as i64).fetch_all(pool).await.expect("it reads");
        at = rows.last().expect("there are records").0;
        done += rows.len();
        sqlx::query("UPDATE plain_position SET at = ?").bind(at).execute(pool).await.expect("it is stored");
    }
    done as f64 / started.elapsed().as_secs_f64()
}

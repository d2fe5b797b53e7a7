//! The ingest of a hub on PostgreSQL, one event at a time and in batches, beside plain inserts of the same rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use posthaste_backend_tests::report::{Aim, Report, Rounds};
use posthaste_backend_tests::servers::Postgres;
use posthaste_core::Event;
use posthaste_hub::{Hub, Parts, Role, Roles, Sealer, Settings};
use posthaste_sql::postgres::HubDatabase;
use posthaste_webhook::{Client, ClientOptions};
use sqlx::postgres::{PgPool, PgPoolOptions};

use crate::ROUNDS;

const PAYLOAD: usize = 220;
/// How many publishes are in flight at once, and how many plain transactions.
const PUBLISHERS: usize = 64;
const CONNECTIONS: usize = 16;

/// The name, the events of one publish, the events of one round, and the aim for the rate.
const SINGLE: (&str, usize, usize, f64) = ("ingest one by one", 1, 20_000, 8_000.0);
const BATCHES: (&str, usize, usize, f64) = ("ingest in batches of 100", 100, 100_000, 40_000.0);

pub async fn run(report: &mut Report) {
    if ![SINGLE, BATCHES].iter().any(|(name, ..)| report.wants(name)) {
        return;
    }
    let database = Postgres::start_with("-c fsync=on -c synchronous_commit=on -c max_wal_size=4GB").await;
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS as u32).connect(database.url()).await.expect("a pool");
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Arc::new(start(database.url(), folder.path()).await);
    for (name, batch, events, aim) in [SINGLE, BATCHES] {
        if !report.wants(name) {
            continue;
        }
        report.saying(name);
        let ours = async || {
            empty(&pool).await;
            let hub = hub.clone();
            at_once(PUBLISHERS, events / batch, move |_| {
                let (hub, events) = (hub.clone(), (0..batch).map(|_| event()).collect());
                async move { drop(hub.ingest().publish(events, false).await.expect("they are stored")) }
            })
            .await
                * batch as f64
        };
        let raw = async || {
            empty(&pool).await;
            let pool = pool.clone();
            at_once(CONNECTIONS, events / batch, move |_| {
                let pool = pool.clone();
                async move { insert(&pool, batch).await }
            })
            .await
                * batch as f64
        };
        report.ratio(name, Rounds::measure(ROUNDS, ours, raw).await, "events/s", Some(Aim::AtLeast(0.7)));
        report.figure(&format!("{name}, alone"), ours().await, "events/s", Some(Aim::AtLeast(aim)));
    }
    hub.stop().await;
}

fn event() -> Event {
    let payload = format!("{{\"text\":\"{}\"}}", "x".repeat(PAYLOAD));
    Event::text("bench.happened", payload).build().expect("an event")
}

/// A hub that only accepts events.
async fn start(database: &str, folder: &std::path::Path) -> Arc<Hub> {
    let parts = Parts {
        database: Arc::new(HubDatabase::open(database, 30).await.expect("it connects")),
        bus: None,
        registry: None,
        channel_buses: Default::default(),
        sources: Vec::new(),
        client: Client::new(ClientOptions::default()),
        sealer: Sealer::open(&folder.join("key")).expect("a key"),
        settings: Settings::default(),
        roles: Roles::of([Role::Ingest]),
    };
    Hub::start(parts).await.expect("it starts")
}

/// Calls `write` this often, so many at once; calls per second.
async fn at_once<F>(writers: usize, calls: usize, write: impl Fn(usize) -> F + Clone + Send + Sync + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let (next, started) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..writers {
        let (write, next) = (write.clone(), next.clone());
        running.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= calls {
                    return;
                }
                write(number).await;
            }
        });
    }
    running.join_all().await;
    calls as f64 / started.elapsed().as_secs_f64()
}

/// The plainest insert of as many rows.
async fn insert(pool: &PgPool, rows: usize) {
    const INSERT: &str = "INSERT INTO outbox_event (event_type, source_service, payload)
        SELECT 'bench.happened', 'bench', payload FROM unnest($1::text[]) AS payload";
    let payload = format!("{{\"text\":\"{}\"}}", "x".repeat(PAYLOAD));
    sqlx::query(INSERT).bind(vec![payload; rows]).execute(pool).await.expect("it inserts");
}

async fn empty(pool: &PgPool) {
    sqlx::raw_sql("TRUNCATE outbox_event").execute(pool).await.expect("it is emptied");
}

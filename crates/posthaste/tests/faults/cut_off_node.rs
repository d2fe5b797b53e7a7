//! One node is cut off from its database while another node is not: for longer than its lease, by connections that
//! stall silently, or by answers that are lost at COMMIT.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste::{Event, Listeners, Mode, Outbox, OutboxStatus, Pool, Settings};
use posthaste_backend_tests::servers::{self, Cutter, Keep};
use posthaste_core::outbox::Store;
use sqlx::{MySqlPool, PgPool};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::process::{PATIENCE, wait_until};

/// Longer than a busy machine pauses the test.
const LEASE: Duration = Duration::from_secs(5);
const WORK: Duration = Duration::from_millis(10);
const EVENTS: usize = 1_500;
const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

/// The deliveries of all nodes together.
#[derive(Clone, Default)]
struct Deliveries {
    /// The number of deliveries of each event.
    counts: Arc<Mutex<HashMap<String, usize>>>,
    /// If there are permits, each delivery needs one.
    permits: Option<Arc<Semaphore>>,
}

impl Deliveries {
    fn listeners(&self) -> Listeners {
        let deliveries = self.clone();
        let listeners = Listeners::new().on_aggregate("a", "t", move |event: Arc<Event>| {
            let deliveries = deliveries.clone();
            async move {
                if let Some(permits) = &deliveries.permits {
                    permits.acquire().await.unwrap().forget();
                }
                *deliveries.counts.lock().unwrap().entry(event.id().to_owned()).or_default() += 1;
                tokio::time::sleep(WORK).await;
            }
        });
        listeners.unwrap()
    }

    fn events(&self) -> usize {
        self.counts.lock().unwrap().len()
    }

    fn total(&self) -> usize {
        self.counts.lock().unwrap().values().sum()
    }

    fn repeated(&self) -> usize {
        self.total() - self.events()
    }
}

async fn start<S: Store>(pool: impl Pool<S>, mode: Mode, deliveries: &Deliveries) -> Outbox<S> {
    start_with(Settings { lease: LEASE, ..Settings::default() }, pool, mode, deliveries).await
}

async fn start_with<S: Store>(
    settings: Settings,
    pool: impl Pool<S>,
    mode: Mode,
    deliveries: &Deliveries,
) -> Outbox<S> {
    let builder = Outbox::new(pool).settings(settings).mode(mode).table(mode.word());
    let builder = builder.poll_interval(Duration::from_millis(50)).listeners(deliveries.listeners());
    builder.start().await.unwrap()
}

/// An outbox that only reads and writes the table.
async fn writer<S: Store>(pool: impl Pool<S>, mode: Mode) -> Outbox<S> {
    Outbox::new(pool).mode(Mode::WriterOnly).table(mode.word()).start().await.unwrap()
}

async fn write<S: Store>(pool: impl Pool<S>, mode: Mode, count: usize) -> Vec<String> {
    let writer = writer(pool, mode).await;
    let events = (0..count).map(|number| Event::text("t", "{}").aggregate("a", number % 300).build().unwrap());
    let events: Vec<Event> = events.collect();
    let mut transaction = writer.begin().await.unwrap();
    let ids = writer.write_all(&mut transaction, &events).await.unwrap();
    transaction.commit().await.unwrap();
    ids
}

/// Waits until every event is done.
async fn settled<S: Store>(outbox: &Outbox<S>, ids: &[String]) {
    let deadline = Instant::now() + PATIENCE;
    for id in ids {
        while outbox.find(id).await.unwrap().unwrap().status != OutboxStatus::Done {
            assert!(Instant::now() < deadline, "not in time: the event {id} is done");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// One node loses its database for longer than a lease. Another node repeats only the deliveries that the first node
/// made and could not settle.
async fn away<S: Store, P: Pool<S> + Clone>(direct: P, proxied: P, cutter: &Cutter, mode: Mode) {
    let deliveries = Deliveries::default();
    let ids = write(direct.clone(), mode, EVENTS).await;
    let cut_off = start(proxied, mode, &deliveries).await;
    wait_until("the node delivers", async || deliveries.events() > 200).await;
    let other = start(direct, mode, &deliveries).await;
    cutter.take_away().await;
    // This sleep, longer than the lease, is the fault itself. The test does not wait for anything here.
    tokio::time::sleep(LEASE + Duration::from_secs(1)).await;
    cutter.restore();
    wait_until("everything is delivered", async || deliveries.events() == EVENTS).await;
    settled(&other, &ids).await;
    cut_off.close().await;
    other.close().await;
    // Four workers deliver a hundred events a second each. The limit is what they deliver in about half a second.
    assert!(deliveries.repeated() <= 250, "{mode:?}: {} deliveries were repeated", deliveries.repeated());
}

/// Open connections stall silently while new ones work. The node does not wait until the operating system notices.
async fn stalled<S: Store, P: Pool<S> + Clone>(direct: P, proxied: P, cutter: &Cutter, mode: Mode) {
    let deliveries = Deliveries::default();
    let ids = write(direct.clone(), mode, EVENTS).await;
    let node = start(proxied, mode, &deliveries).await;
    for stalls in 1..=2 {
        wait_until("the node delivers", async || deliveries.events() > 300 * stalls).await;
        cutter.stall();
    }
    wait_until("everything is delivered", async || deliveries.events() == EVENTS).await;
    // The server keeps the locks of a stalled transaction for up to 10 seconds, which is longer than a node drains.
    settled(&writer(direct, mode).await, &ids).await;
    node.close().await;
    assert!(deliveries.repeated() <= 250, "{mode:?}: {} deliveries were repeated", deliveries.repeated());
}

/// The answer to a COMMIT is lost for every twenty deliveries, whatever it commits: a claim, a settlement or a renewal.
async fn lost_answers<S: Store, P: Pool<S> + Clone>(direct: P, proxied: P, cutter: &Cutter, mode: Mode) {
    const CUTS: usize = 30;
    const DELIVERIES: usize = 20;
    let permits = Arc::new(Semaphore::new(0));
    let deliveries = Deliveries { permits: Some(permits.clone()), ..Deliveries::default() };
    let ids = write(direct.clone(), mode, CUTS * DELIVERIES).await;
    // No pause of the machine is as long as this lease. The short queue makes the node claim again and again.
    let settings = Settings { lease: Duration::from_secs(20), cold_queue: 3 * DELIVERIES, ..Settings::default() };
    let node = start_with(settings, proxied, mode, &deliveries).await;
    for cut in 1..=CUTS {
        cutter.cut_when_sent(b"COMMIT", Keep::Forwarded);
        permits.add_permits(DELIVERIES);
        timeout(PATIENCE, cutter.cut()).await.expect("the node sends a COMMIT");
        wait_until("the node delivers more", async || deliveries.total() >= cut * DELIVERIES).await;
    }
    permits.add_permits(10 * ids.len());
    wait_until("everything is delivered", async || deliveries.events() == ids.len()).await;
    let reader = writer(direct, mode).await;
    settled(&reader, &ids).await;
    node.close().await;
    assert_eq!(deliveries.repeated(), 0, "{mode:?}: a lost answer repeats no delivery");
    for id in &ids {
        let row = reader.find(id).await.unwrap().unwrap();
        assert_eq!(row.lease_losses, 0, "{mode:?}: a lost answer is not a lost lease");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn losing_postgres_for_longer_than_a_lease_repeats_only_deliveries_in_flight() {
    for mode in MODES {
        let (url, cutter) = postgres().await;
        away(PgPool::connect(&url).await.unwrap(), PgPool::connect(cutter.url()).await.unwrap(), &cutter, mode).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn losing_mariadb_for_longer_than_a_lease_repeats_only_deliveries_in_flight() {
    for mode in MODES {
        let (url, cutter) = mariadb().await;
        let (direct, proxied) =
            (MySqlPool::connect(&url).await.unwrap(), MySqlPool::connect(cutter.url()).await.unwrap());
        away(direct, proxied, &cutter, mode).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_connections_to_postgres_are_replaced() {
    for mode in MODES {
        let (url, cutter) = postgres().await;
        stalled(PgPool::connect(&url).await.unwrap(), PgPool::connect(cutter.url()).await.unwrap(), &cutter, mode)
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_connections_to_mariadb_are_replaced() {
    for mode in MODES {
        let (url, cutter) = mariadb().await;
        let (direct, proxied) =
            (MySqlPool::connect(&url).await.unwrap(), MySqlPool::connect(cutter.url()).await.unwrap());
        stalled(direct, proxied, &cutter, mode).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_commit_answers_of_postgres_repeat_no_delivery() {
    for mode in MODES {
        let (url, cutter) = postgres().await;
        lost_answers(PgPool::connect(&url).await.unwrap(), PgPool::connect(cutter.url()).await.unwrap(), &cutter, mode)
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_commit_answers_of_mariadb_repeat_no_delivery() {
    for mode in MODES {
        let (url, cutter) = mariadb().await;
        let (direct, proxied) =
            (MySqlPool::connect(&url).await.unwrap(), MySqlPool::connect(cutter.url()).await.unwrap());
        lost_answers(direct, proxied, &cutter, mode).await;
    }
}

async fn postgres() -> (String, Cutter) {
    let url = servers::postgres().await;
    let cutter = Cutter::to(&url).await;
    (url, cutter)
}

async fn mariadb() -> (String, Cutter) {
    let url = servers::mariadb().await;
    let cutter = Cutter::to(&url).await;
    (url, cutter)
}

//! One node is cut off from its database while another node is not: for longer than its lease, by connections that
//! stall silently, or by answers that are lost at COMMIT.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste::{Event, Listeners, Mode, Outbox, OutboxStatus, Pool};
use posthaste_backend_tests::servers::{self, Cutter, Keep};
use posthaste_core::outbox::Store;
use sqlx::{MySqlPool, PgPool};

use crate::process::{PATIENCE, wait_until};

const LEASE: Duration = Duration::from_secs(2);
const WORK: Duration = Duration::from_millis(10);
const EVENTS: usize = 1_500;
const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

/// The number of deliveries of each event, by all nodes together.
#[derive(Clone, Default)]
struct Deliveries(Arc<Mutex<HashMap<String, usize>>>);

impl Deliveries {
    fn listeners(&self) -> Listeners {
        let deliveries = self.clone();
        let listeners = Listeners::new().on_aggregate("a", "t", move |event: Arc<Event>| {
            let deliveries = deliveries.clone();
            async move {
                *deliveries.0.lock().unwrap().entry(event.id().to_owned()).or_default() += 1;
                tokio::time::sleep(WORK).await;
            }
        });
        listeners.unwrap()
    }

    fn events(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn repeated(&self) -> usize {
        self.0.lock().unwrap().values().map(|count| count - 1).sum()
    }
}

async fn start<S: Store>(pool: impl Pool<S>, mode: Mode, deliveries: &Deliveries) -> Outbox<S> {
    let builder = Outbox::new(pool).mode(mode).table(mode.word()).lease(LEASE).listeners(deliveries.listeners());
    builder.poll_interval(Duration::from_millis(50)).start().await.unwrap()
}

async fn write<S: Store>(pool: impl Pool<S>, mode: Mode, count: usize) -> Vec<String> {
    let writer = Outbox::new(pool).mode(Mode::WriterOnly).table(mode.word()).start().await.unwrap();
    let events = (0..count).map(|number| Event::text("t", "{}").aggregate("a", number % 300).build().unwrap());
    let events: Vec<Event> = events.collect();
    let mut transaction = writer.begin().await.unwrap();
    let ids = writer.write_all(&mut transaction, &events).await.unwrap();
    transaction.commit().await.unwrap();
    ids
}

/// Every event is done.
async fn check<S: Store>(outbox: &Outbox<S>, ids: &[String]) {
    for id in ids {
        let row = outbox.find(id).await.unwrap().unwrap();
        assert_eq!(row.status, OutboxStatus::Done, "{row:?}");
    }
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
    wait_until("the node delivers", || deliveries.events() > 200);
    let other = start(direct, mode, &deliveries).await;
    cutter.take_away().await;
    // This sleep, longer than the lease, is the fault itself. The test does not wait for anything here.
    tokio::time::sleep(LEASE * 2).await;
    cutter.restore();
    wait_until("everything is delivered", || deliveries.events() == EVENTS);
    cut_off.close().await;
    other.close().await;
    check(&other, &ids).await;
    // Four workers deliver a hundred events a second each. The limit is what they deliver in about half a second.
    assert!(deliveries.repeated() <= 250, "{mode:?}: {} deliveries were repeated", deliveries.repeated());
}

/// Open connections stall silently while new ones work. The node does not wait until the operating system notices.
async fn stalled<S: Store, P: Pool<S> + Clone>(direct: P, proxied: P, cutter: &Cutter, mode: Mode) {
    let deliveries = Deliveries::default();
    let ids = write(direct.clone(), mode, EVENTS).await;
    let node = start(proxied, mode, &deliveries).await;
    for stalls in 1..=2 {
        wait_until("the node delivers", || deliveries.events() > 300 * stalls);
        cutter.stall();
    }
    wait_until("everything is delivered", || deliveries.events() == EVENTS);
    // The server keeps the locks of a stalled transaction for up to 10 seconds, which is longer than a node drains.
    let reader = Outbox::new(direct).mode(Mode::WriterOnly).table(mode.word()).start().await.unwrap();
    settled(&reader, &ids).await;
    node.close().await;
    assert!(deliveries.repeated() <= 250, "{mode:?}: {} deliveries were repeated", deliveries.repeated());
}

/// The answer to the next COMMIT is lost, whatever it commits: a claim, a settlement or a renewal.
async fn lost_answers<S: Store, P: Pool<S> + Clone>(direct: P, proxied: P, cutter: &Cutter, mode: Mode) {
    let deliveries = Deliveries::default();
    let ids = write(direct.clone(), mode, EVENTS).await;
    let node = start(proxied, mode, &deliveries).await;
    let mut cuts = 0;
    while deliveries.events() < EVENTS - 100 {
        let seen = deliveries.events();
        cutter.cut_when_sent(b"COMMIT", Keep::Forwarded);
        cutter.cut().await;
        cuts += 1;
        wait_until("the node delivers more", || deliveries.events() > seen + 50);
    }
    assert!(cuts > 10, "{cuts}");
    wait_until("everything is delivered", || deliveries.events() == EVENTS);
    node.close().await;
    let reader = Outbox::new(direct).mode(Mode::WriterOnly).table(mode.word()).start().await.unwrap();
    check(&reader, &ids).await;
    assert_eq!(deliveries.repeated(), 0, "{mode:?}: a lost answer repeats no delivery");
    for id in &ids {
        assert_eq!(
            reader.find(id).await.unwrap().unwrap().lease_losses,
            0,
            "{mode:?}: a lost answer is not a lost lease"
        );
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

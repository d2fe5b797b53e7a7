//! The library's relay end to end: business code writes in its own transaction, listeners on one or two nodes hear of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::{DispatcherOptions, Event, Listeners, dispatcher};
use posthaste_sql::TableName;
use posthaste_sql::outbox::{Mode, OutboxStatus, Reader};
use posthaste_sql::postgres::Outbox;
use posthaste_testing::servers;
use sqlx::PgPool;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// What listeners of all nodes were called with.
#[derive(Clone, Default)]
struct Calls(Arc<(Mutex<HashMap<String, usize>>, Notify)>);

impl Calls {
    fn add(&self, event: &Event) {
        *self.0.0.lock().unwrap().entry(event.id().to_owned()).or_default() += 1;
        self.0.1.notify_waiters();
    }

    fn counts(&self) -> HashMap<String, usize> {
        self.0.0.lock().unwrap().clone()
    }

    async fn wait_for(&self, events: usize) {
        let enough = async {
            loop {
                let called = self.0.1.notified();
                if self.counts().len() >= events {
                    return;
                }
                called.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), enough).await.expect("listeners are called");
    }
}

struct Node {
    outbox: Outbox,
    stop: CancellationToken,
    relay: JoinHandle<()>,
}

impl Node {
    /// A process of the service: its own pool, its own relay. `work` is how long its listener takes.
    async fn start(url: &str, mode: Mode, calls: &Calls, work: Duration) -> Self {
        let pool = PgPool::connect(url).await.unwrap();
        let table = TableName::new("shop_outbox").unwrap();
        let outbox = Outbox::open(pool, table, Reader::Dispatcher, mode, Duration::from_secs(30)).await.unwrap();
        let calls = calls.clone();
        let listeners = Listeners::new().on_json("order.placed", move |_: i64, event: Arc<Event>| {
            let calls = calls.clone();
            async move {
                calls.add(&event);
                tokio::time::sleep(work).await;
            }
        });
        let options = DispatcherOptions { poll_interval: Duration::from_millis(100), ..DispatcherOptions::default() };
        let stop = CancellationToken::new();
        let relay = dispatcher(outbox.dispatcher_source(), listeners.unwrap(), options).run(stop.clone());
        Self { relay: tokio::spawn(relay), outbox, stop }
    }

    async fn stop(self) -> Outbox {
        self.stop.cancel();
        self.relay.await.unwrap();
        self.outbox
    }
}

/// Places orders through a pool that knows nothing of Posthaste; every tenth is rolled back.
async fn place_orders(url: &str, outbox: &Outbox, count: i64) -> Vec<String> {
    let pool = PgPool::connect(url).await.unwrap();
    sqlx::query("CREATE TABLE orders (id bigint PRIMARY KEY)").execute(&pool).await.unwrap();
    let mut placed = Vec::new();
    for number in 0..count {
        let mut transaction = pool.begin().await.unwrap();
        sqlx::query("INSERT INTO orders (id) VALUES ($1)").bind(number).execute(&mut *transaction).await.unwrap();
        let id = outbox.write(&mut transaction, &Event::json("order.placed", &number).unwrap()).await.unwrap();
        match number % 10 {
            9 => transaction.rollback().await.unwrap(),
            _ => {
                transaction.commit().await.unwrap();
                placed.push(id);
            }
        }
    }
    placed
}

async fn check(outbox: &Outbox, placed: &[String], calls: &Calls) {
    let counts = calls.counts();
    assert_eq!(counts.len(), placed.len(), "what was rolled back is never seen");
    assert!(placed.iter().all(|id| counts.get(id) == Some(&1)), "deliveries == events when nothing crashes");
    for id in placed {
        assert_eq!(outbox.find(id).await.unwrap().unwrap().status, OutboxStatus::Done);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_calls_its_listener_once_for_every_commit() {
    let url = servers::postgres().await;
    let calls = Calls::default();
    let node = Node::start(&url, Mode::SingleNode, &calls, Duration::ZERO).await;
    let placed = place_orders(&url, &node.outbox, 100).await;
    calls.wait_for(placed.len()).await;
    let outbox = node.stop().await;
    check(&outbox, &placed, &calls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_with_slow_listeners_share_the_work_without_a_duplicate() {
    let url = servers::postgres().await;
    let calls = Calls::default();
    let work = Duration::from_millis(20);
    let first = Node::start(&url, Mode::MultiNode, &calls, work).await;
    let second = Node::start(&url, Mode::MultiNode, &calls, work).await;
    let placed = place_orders(&url, &first.outbox, 200).await;
    calls.wait_for(placed.len()).await;
    first.stop().await;
    let outbox = second.stop().await;
    check(&outbox, &placed, &calls).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_and_one_that_starts_deliver_everything_once() {
    let url = servers::postgres().await;
    let calls = Calls::default();
    let first = Node::start(&url, Mode::MultiNode, &calls, Duration::from_millis(200)).await;
    let placed = place_orders(&url, &first.outbox, 100).await;
    calls.wait_for(1).await;
    // It delivers what it can within its drain time and gives back the rest; the second may take only that.
    let stopping = tokio::spawn(first.stop());
    let second = Node::start(&url, Mode::MultiNode, &calls, Duration::ZERO).await;
    calls.wait_for(placed.len()).await;
    stopping.await.unwrap();
    let outbox = second.stop().await;
    check(&outbox, &placed, &calls).await;
}

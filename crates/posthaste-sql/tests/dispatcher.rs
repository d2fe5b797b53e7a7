//! The library's relay on a table of its own: business code writes in its transaction, a listener is called after it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::{DispatcherOptions, Event, Failure, Listeners, Outcome, Relay, RetryPolicy, Source, dispatcher};
use posthaste_sql::TableName;
use posthaste_sql::sqlite::{Database, Outbox, OutboxStatus, Reader};
use sqlx::sqlite::SqlitePool;
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

struct Shop {
    /// The service's own pool, which knows nothing of Posthaste.
    pool: SqlitePool,
    outbox: Outbox,
    _folder: TempDir,
}

impl Shop {
    async fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("shop.db").display());
        let database = Database::open(&url).await.unwrap();
        let outbox = Self::outbox(&database).await;
        let pool = SqlitePool::connect(&url).await.unwrap();
        sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
        Self { pool, outbox, _folder: folder }
    }

    async fn outbox(database: &Database) -> Outbox {
        let table = TableName::new("shop_outbox").unwrap();
        Outbox::open(database.clone(), table, Reader::Dispatcher, Duration::from_secs(30)).await.unwrap()
    }

    /// One order and its event, in one transaction.
    async fn place(&self, number: i64, commit: bool) -> String {
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(number).execute(&mut *transaction).await.unwrap();
        let event = Event::json("order.placed", &number).unwrap();
        let id = self.outbox.write(&mut transaction, &event).await.unwrap();
        match commit {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
        id
    }

    async fn status(&self, id: &str) -> OutboxStatus {
        self.outbox.find(id).await.unwrap().unwrap().status
    }
}

/// What listeners were called with.
#[derive(Clone, Default)]
struct Calls(Arc<(Mutex<Vec<String>>, Notify)>);

impl Calls {
    /// Listeners that only remember.
    fn listeners(&self) -> Listeners {
        let calls = self.clone();
        let listening = Listeners::new().on("order.placed", move |event| {
            let calls = calls.clone();
            async move {
                calls.add(&event);
            }
        });
        listening.unwrap()
    }

    fn add(&self, event: &Event) -> usize {
        let mut calls = self.0.0.lock().unwrap();
        calls.push(event.id().to_owned());
        self.0.1.notify_waiters();
        calls.iter().filter(|id| *id == event.id()).count()
    }

    fn count(&self) -> usize {
        self.0.0.lock().unwrap().len()
    }

    async fn wait_for(&self, count: usize) {
        let enough = async {
            loop {
                let called = self.0.1.notified();
                if self.count() >= count {
                    return;
                }
                called.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), enough).await.expect("listeners are called");
    }
}

struct Running {
    stop: CancellationToken,
    relay: JoinHandle<()>,
}

impl Running {
    fn start(outbox: &Outbox, listeners: Listeners) -> Self {
        let options = DispatcherOptions {
            retry: RetryPolicy::Exponential {
                base: Duration::from_millis(20),
                max: Duration::from_millis(50),
                max_attempts: Some(3),
            },
            // Long, so that only wake-ups and due times explain a delivery.
            poll_interval: Duration::from_secs(3_600),
            ..DispatcherOptions::default()
        };
        let relay: Relay<_, _> = dispatcher(outbox.dispatcher_source(), listeners, options);
        let stop = CancellationToken::new();
        Self { relay: tokio::spawn(relay.run(stop.clone())), stop }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.relay.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_is_called_once_for_what_committed_and_never_for_what_did_not() {
    let shop = Shop::open().await;
    let calls = Calls::default();
    let running = Running::start(&shop.outbox, calls.listeners());
    let rolled_back = shop.place(-1, false).await;
    let mut placed = Vec::new();
    for number in 0..50 {
        placed.push(shop.place(number, true).await);
    }
    calls.wait_for(50).await;
    running.stop().await;
    let mut counts: HashMap<String, usize> = HashMap::new();
    calls.0.0.lock().unwrap().iter().for_each(|id| *counts.entry(id.clone()).or_default() += 1);
    assert!(placed.iter().all(|id| counts.get(id) == Some(&1)), "deliveries == events when nothing crashes");
    assert!(!counts.contains_key(&rolled_back));
    for id in &placed {
        assert_eq!(shop.status(id).await, OutboxStatus::Done);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_and_panics_are_counted_until_the_event_is_dead() {
    let shop = Shop::open().await;
    let calls = Calls::default();
    let seen = calls.clone();
    let listeners = Listeners::new().on("order.placed", move |event| {
        let seen = seen.clone();
        async move {
            match seen.add(&event) {
                1 => Outcome::Failed(Failure::transient("shop", "closed")),
                2 => panic!("the shop burns"),
                _ => Outcome::Failed(Failure::transient("shop", "gone")),
            }
        }
    });
    let running = Running::start(&shop.outbox, listeners.unwrap());
    let id = shop.place(1, true).await;
    calls.wait_for(3).await;
    running.stop().await;
    let row = shop.outbox.find(&id).await.unwrap().unwrap();
    assert_eq!((row.status, row.last_error.as_deref()), (OutboxStatus::Dead, Some("shop: gone")));
    assert_eq!(calls.count(), 3, "three attempts and no more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snooze_costs_no_attempt_and_an_unroutable_event_is_dead_at_once() {
    let shop = Shop::open().await;
    let calls = Calls::default();
    let seen = calls.clone();
    let listeners = Listeners::new().on("order.placed", move |event| {
        let seen = seen.clone();
        async move {
            match seen.add(&event) {
                1..=5 => Outcome::Snoozed { wait: Duration::from_millis(10) },
                _ => Outcome::Delivered,
            }
        }
    });
    let running = Running::start(&shop.outbox, listeners.unwrap());
    let id = shop.place(1, true).await;
    let mut connection = shop.pool.acquire().await.unwrap();
    let stray = Event::json("order.unknown", &1).unwrap();
    shop.outbox.write(&mut connection, &stray).await.unwrap();
    shop.outbox.committed();
    calls.wait_for(6).await;
    running.stop().await;
    let row = shop.outbox.find(&id).await.unwrap().unwrap();
    assert_eq!((row.status, row.attempts), (OutboxStatus::Done, 0));
    let stray = shop.outbox.find(stray.id()).await.unwrap().unwrap();
    assert_eq!((stray.status, stray.attempts), (OutboxStatus::Dead, 0));
    assert!(stray.last_error.unwrap().starts_with("unroutable"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_loses_nothing_and_the_next_process_goes_on() {
    let shop = Shop::open().await;
    let calls = Calls::default();
    let seen = calls.clone();
    let hanging = Listeners::new().on("order.placed", move |event| {
        let seen = seen.clone();
        async move {
            seen.add(&event);
            std::future::pending::<()>().await;
        }
    });
    let crashing = Running::start(&shop.outbox, hanging.unwrap());
    let mut placed = Vec::new();
    for number in 0..10 {
        placed.push(shop.place(number, true).await);
    }
    calls.wait_for(4).await;
    crashing.relay.abort();
    assert!(crashing.relay.await.unwrap_err().is_cancelled());

    // The next process: another owner on the same table, told that nobody else is there.
    let folder = shop._folder.path().join("shop.db");
    let database = Database::open(&format!("sqlite://{}", folder.display())).await.unwrap();
    let outbox = Shop::outbox(&database).await;
    outbox.void_lease().await.unwrap();
    let after = Calls::default();
    let running = Running::start(&outbox, after.listeners());
    after.wait_for(10).await;
    running.stop().await;
    for id in &placed {
        assert_eq!(outbox.find(id).await.unwrap().unwrap().status, OutboxStatus::Done);
    }
    assert_eq!(after.count(), 10);
}

#[tokio::test]
async fn a_table_of_a_dispatcher_is_not_read_by_channels() {
    let shop = Shop::open().await;
    let database =
        Database::open(&format!("sqlite://{}", shop._folder.path().join("shop.db").display())).await.unwrap();
    let table = TableName::new("shop_outbox").unwrap();
    let refused = Outbox::open(database, table, Reader::Channels, Duration::from_secs(30)).await;
    let message = refused.err().expect("refused").to_string();
    assert!(message.contains("table") && message.contains("dispatcher"), "{message}");
    assert!(shop.outbox.dispatcher_source().claim(1).await.unwrap().items.is_empty());
}

//! The library on a SQLite file: business code writes an event in its transaction, and a listener is called after the
//! commit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste_core::outbox::{
    Mode, OpenError, Outbox, OutboxBuilder, OutboxRow, OutboxStatus, Reader, Settings, StartError, Store, Table,
    TableName,
};
use posthaste_core::{Event, Failure, Listeners, Outcome, RetryPolicy, Source};
use posthaste_sql::sqlite::{Database, OutboxStore};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;
use tokio::sync::Notify;

/// The time after which a test stops waiting and fails.
const PATIENCE: Duration = Duration::from_secs(30);

const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

struct Shop {
    /// The service's own pool, without any settings of Posthaste.
    pool: SqlitePool,
    folder: TempDir,
}

impl Shop {
    async fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new().filename(folder.path().join("shop.db")).create_if_missing(true);
        let pool = SqlitePool::connect_with(options).await.unwrap();
        sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
        Self { pool, folder }
    }

    fn outbox(&self, mode: Mode) -> OutboxBuilder<SqlitePool, OutboxStore> {
        let settings = Settings {
            table: TableName::new("shop_outbox").unwrap(),
            mode,
            retry: RetryPolicy::Exponential {
                base: Duration::from_millis(20),
                max: Duration::from_millis(50),
                max_attempts: Some(3),
            },
            // Long, so that only a wake-up or a due time can cause a delivery.
            poll_interval: Some(Duration::from_secs(3_600)),
            ..Settings::default()
        };
        Outbox::new(self.pool.clone()).settings(settings)
    }

    /// Writes one order and its event in a transaction of the outbox, which notices the commit.
    async fn place(&self, outbox: &Outbox<OutboxStore>, number: i64, commit: bool) -> String {
        let mut transaction = outbox.begin().await.unwrap();
        sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(number).execute(&mut *transaction).await.unwrap();
        let id = outbox.write(&mut transaction, order(number)).await.unwrap().unwrap();
        match commit {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
        id
    }

    /// Writes one order and its event in a transaction of sqlx.
    async fn place_plainly(&self, outbox: &Outbox<OutboxStore>, number: i64) -> String {
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(number).execute(&mut *transaction).await.unwrap();
        let id = outbox.write(&mut transaction, order(number)).await.unwrap().unwrap();
        transaction.commit().await.unwrap();
        id
    }
}

fn order(number: i64) -> Event {
    Event::json("order.placed", &number).unwrap().build().unwrap()
}

/// Waits until an event has this status, and returns its row.
async fn row_when(outbox: &Outbox<OutboxStore>, id: &str, status: OutboxStatus) -> OutboxRow {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let row = outbox.find(id).await.unwrap().unwrap();
        if row.status == status {
            return row;
        }
        assert!(Instant::now() < deadline, "not in time: {status:?} of {row:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The events with which listeners were called.
#[derive(Clone, Default)]
struct Calls(Arc<(Mutex<Vec<String>>, Notify)>);

impl Calls {
    /// Listeners that only record their calls.
    fn listeners(&self) -> Listeners {
        self.answering(|_| Outcome::Delivered)
    }

    /// Listeners whose outcome depends on the number of calls with the same event.
    fn answering(&self, answer: impl Fn(usize) -> Outcome + Send + Sync + Clone + 'static) -> Listeners {
        let calls = self.clone();
        let listening = Listeners::new().on("order.placed", move |event| {
            let (calls, answer) = (calls.clone(), answer.clone());
            async move { answer(calls.add(&event)) }
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
                tokio::pin!(called);
                called.as_mut().enable();
                if self.count() >= count {
                    return;
                }
                called.await;
            }
        };
        tokio::time::timeout(PATIENCE, enough).await.expect("listeners are called");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_is_called_once_per_committed_event_and_never_after_a_rollback() {
    for mode in MODES {
        let shop = Shop::open().await;
        let calls = Calls::default();
        let outbox = shop.outbox(mode).listeners(calls.listeners()).start().await.unwrap();
        let rolled_back = shop.place(&outbox, -1, false).await;
        let mut placed = Vec::new();
        for number in 0..25 {
            placed.push(shop.place(&outbox, number, true).await);
            placed.push(shop.place_plainly(&outbox, 100 + number).await);
        }
        for id in &placed {
            row_when(&outbox, id, OutboxStatus::Done).await;
        }
        outbox.close().await;
        let mut counts: HashMap<String, usize> = HashMap::new();
        calls.0.0.lock().unwrap().iter().for_each(|id| *counts.entry(id.clone()).or_default() += 1);
        assert!(placed.iter().all(|id| counts.get(id) == Some(&1)), "deliveries == events when nothing crashes");
        assert!(!counts.contains_key(&rolled_back));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_concurrent_writers_and_the_dispatcher_do_not_block_each_other() {
    for mode in MODES {
        let shop = Arc::new(Shop::open().await);
        let calls = Calls::default();
        let outbox = shop.outbox(mode).listeners(calls.listeners()).start().await.unwrap();
        let writers = (0..8).map(|writer| {
            let (shop, outbox) = (shop.clone(), outbox.clone());
            tokio::spawn(async move {
                for number in 0..50 {
                    shop.place(&outbox, writer * 1_000 + number, true).await;
                }
            })
        });
        for writer in writers.collect::<Vec<_>>() {
            writer.await.unwrap();
        }
        calls.wait_for(400).await;
        outbox.close().await;
        assert_eq!(calls.count(), 400, "{mode:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_and_panics_are_counted_until_the_event_is_dead() {
    for mode in MODES {
        let shop = Shop::open().await;
        let calls = Calls::default();
        let listeners = calls.answering(|call| match call {
            1 => Outcome::Failed(Failure::transient("shop", "closed")),
            2 => panic!("the shop burns"),
            _ => Outcome::Failed(Failure::transient("shop", "gone")),
        });
        let outbox = shop.outbox(mode).listeners(listeners).start().await.unwrap();
        let id = shop.place(&outbox, 1, true).await;
        let row = row_when(&outbox, &id, OutboxStatus::Dead).await;
        outbox.close().await;
        assert_eq!(row.last_error.as_deref(), Some("shop: gone"));
        assert_eq!(calls.count(), 3, "three attempts and no more");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snooze_costs_no_attempt_and_an_unroutable_event_is_dead_at_once() {
    for mode in MODES {
        let shop = Shop::open().await;
        let calls = Calls::default();
        let listeners = calls.answering(|call| match call {
            1..=5 => Outcome::Snoozed { wait: Duration::from_millis(10) },
            _ => Outcome::Delivered,
        });
        let outbox = shop.outbox(mode).listeners(listeners).start().await.unwrap();
        let id = shop.place(&outbox, 1, true).await;
        let mut transaction = outbox.begin().await.unwrap();
        let stray = Event::json("order.unknown", &1).unwrap();
        let stray = outbox.write(&mut transaction, stray).await.unwrap().unwrap();
        transaction.commit().await.unwrap();
        let row = row_when(&outbox, &id, OutboxStatus::Done).await;
        let stray = row_when(&outbox, &stray, OutboxStatus::Dead).await;
        outbox.close().await;
        assert_eq!((calls.count(), row.attempts, stray.attempts), (6, 0, 0));
        assert!(stray.last_error.unwrap().starts_with("unroutable"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_loses_no_event_and_the_next_process_continues() {
    let shop = Shop::open().await;
    // A process that claimed a row and crashed.
    let store = Database::open(&format!("sqlite://{}", shop.folder.path().join("shop.db").display())).await.unwrap();
    let store = store.outbox(TableName::new("shop_outbox").unwrap(), Mode::SingleNode).await.unwrap();
    let crashed = Table::open(store, Reader::Dispatcher, Duration::from_secs(30)).await.unwrap();
    let events: Vec<Event> = (0..10).map(order).collect();
    let ids: Vec<String> = events.iter().map(|event| event.id().to_owned()).collect();
    crashed.store().ingest(events.into_iter().map(Arc::new).collect()).await.unwrap();
    let claimed = crashed.dispatcher_source().claim(4).await.unwrap();
    assert_eq!(claimed.items.len(), 4);

    // The next process, which knows that no other process uses the file.
    crashed.store().void_lease().await.unwrap();
    let calls = Calls::default();
    let outbox = shop.outbox(Mode::SingleNode).listeners(calls.listeners()).start().await.unwrap();
    for id in &ids {
        row_when(&outbox, id, OutboxStatus::Done).await;
    }
    outbox.close().await;
    assert_eq!(calls.count(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_stop_leaves_the_remaining_events_to_another_node() {
    for mode in MODES {
        let shop = Shop::open().await;
        let calls = Calls::default();
        let seen = calls.clone();
        let busy = shop.outbox(mode).workers(1).settings(Settings {
            drain: Duration::from_millis(50),
            workers: 1,
            mode,
            table: TableName::new("shop_outbox").unwrap(),
            ..Settings::default()
        });
        let busy = busy.on("order.placed", move |event| {
            let seen = seen.clone();
            async move {
                seen.add(&event);
                std::future::pending::<()>().await;
            }
        });
        let busy = busy.start().await.unwrap();
        for number in 0..5 {
            shop.place(&busy, number, true).await;
        }
        calls.wait_for(1).await;
        busy.close().await;
        let after = Calls::default();
        let next = shop.outbox(mode).listeners(after.listeners()).start().await.unwrap();
        after.wait_for(5).await;
        next.close().await;
        assert_eq!(after.count(), 5, "{mode:?}");
    }
}

#[tokio::test]
async fn a_table_of_a_dispatcher_is_not_read_by_channels() {
    let shop = Shop::open().await;
    let outbox = shop.outbox(Mode::SingleNode).listeners(Calls::default().listeners()).start().await.unwrap();
    let file = format!("sqlite://{}", shop.folder.path().join("shop.db").display());
    let database = Database::open(&file).await.unwrap();
    let store = database.outbox(outbox.table().store().table().clone(), Mode::SingleNode).await.unwrap();
    let refused = Table::open(store, Reader::Channels, Duration::from_secs(30)).await;
    let error = refused.err().expect("refused");
    assert!(matches!(error, OpenError::OtherReader { .. }), "{error}");
    let other_mode = shop.outbox(Mode::MultiNode).listeners(Calls::default().listeners()).start().await;
    assert!(matches!(other_mode.err().unwrap(), StartError::Open(OpenError::OtherMode { .. })));
    outbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_only_process_writes_to_a_table_of_any_mode() {
    for mode in MODES {
        let shop = Shop::open().await;
        let calls = Calls::default();
        let reader = shop.outbox(mode).listeners(calls.listeners()).start().await.unwrap();
        let table = TableName::new("shop_outbox").unwrap();
        let writer = Outbox::<OutboxStore>::new(shop.pool.clone());
        let writer = writer.settings(Settings { table, mode: Mode::WriterOnly, ..Settings::default() });
        let writer = writer.start().await.unwrap();
        shop.place(&writer, 1, true).await;
        // SQLite has no NOTIFY: the test wakes the reader, which would otherwise find the event at its next poll.
        reader.committed();
        calls.wait_for(1).await;
        reader.close().await;
        writer.close().await;
    }
}

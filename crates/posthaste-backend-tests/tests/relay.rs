//! The promises of the engine, one test each, on the in-memory store and sink and on a paused clock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_backend_tests::MemorySink;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OutboxItem, OutboxRow, OutboxSource, OutboxStatus, Pool, Reader, Table, TableName};
use posthaste_core::{
    Claim, Claimed, Event, Failure, FaultKind, OnStop, Outcome, Relay, RelayOptions, RetryPolicy, Settled, Settlement,
    Source, StoreError, Wakeup,
};
use posthaste_testing::{MemoryDatabase, MemoryOutbox};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

const LEASE: Duration = Duration::from_secs(30);

type RecordingSink = MemorySink<OutboxItem>;

/// An in-memory outbox that wakes all its readers after a write.
struct Rows {
    store: MemoryOutbox,
    database: MemoryDatabase,
    readers: Mutex<Vec<Table<MemoryOutbox>>>,
}

impl Rows {
    async fn new() -> Self {
        let database = MemoryDatabase::new();
        let store = database.open(TableName::default(), Mode::ORDERED).await.unwrap();
        Self { store, database, readers: Mutex::default() }
    }

    /// Opens the table as a new process would.
    async fn open(&self) -> Table<MemoryOutbox> {
        let table = Table::open(self.store.clone(), Reader::Dispatcher, LEASE).await.unwrap();
        self.readers.lock().unwrap().push(table.clone());
        table
    }

    async fn insert(&self, label: &str, key: Option<&str>, delay: Duration) {
        self.insert_many(label, 1, key, delay).await;
    }

    async fn insert_many(&self, label: &str, count: usize, key: Option<&str>, delay: Duration) {
        let mut transaction = self.store.begin().await.unwrap();
        for _ in 0..count {
            let delay = (!delay.is_zero()).then_some(delay);
            let event = Event::text("test", label).aggregate_id(key.map(str::to_owned)).deliver_after(delay);
            self.store.insert(&mut transaction, &[&event.build().unwrap()], None).await.unwrap();
        }
        transaction.commit().await.unwrap();
        self.readers.lock().unwrap().iter().for_each(Table::committed);
    }

    fn all(&self) -> Vec<OutboxRow> {
        self.database.rows("outbox_event")
    }

    fn first(&self) -> OutboxRow {
        self.all().remove(0)
    }
}

struct Running {
    relay: JoinHandle<()>,
    stop: CancellationToken,
}

impl Running {
    async fn start(rows: &Rows, sink: &RecordingSink, options: RelayOptions) -> Self {
        Self::on(rows.open().await.dispatcher_source(), sink, options)
    }

    fn on(source: impl Source<Item = OutboxItem>, sink: &RecordingSink, options: RelayOptions) -> Self {
        let stop = CancellationToken::new();
        let relay = Relay::new("test", Arc::new(source), Arc::new(sink.clone()), options);
        Self { relay: tokio::spawn(relay.run(stop.clone())), stop }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.relay.await.unwrap();
    }
}

fn options() -> RelayOptions {
    RelayOptions {
        poll_interval: Duration::from_secs(3_600),
        retry: RetryPolicy::Fixed { interval: Duration::from_secs(1), max_attempts: Some(3) },
        ..RelayOptions::default()
    }
}

/// A source whose requests and answers can be slow, and that can fail.
struct Slow {
    source: OutboxSource<MemoryOutbox>,
    claim_answers_after: Duration,
    /// Only for the first renewal.
    renewal_arrives_after: Mutex<Duration>,
    settlement_answers_after: Duration,
    /// The number of items in each settlement.
    settled: Arc<Mutex<Vec<usize>>>,
    faults: Arc<Faults>,
}

/// The calls that are to fail, and how often.
#[derive(Default)]
struct Faults {
    panics_in_claim: AtomicUsize,
    failed_settlements: AtomicUsize,
    failed_renewals: AtomicUsize,
    /// The source refuses settlements that contain an item with this label, with a permanent error. A settlement of one
    /// item counts down the number.
    refused: Mutex<(&'static str, usize)>,
}

/// Counts down, and returns true until the count is zero.
fn strikes(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

fn failed(kind: FaultKind) -> StoreError {
    StoreError::new("reach the database", kind, "the test said so")
}

impl Slow {
    fn new(source: OutboxSource<MemoryOutbox>) -> Self {
        Self {
            source,
            claim_answers_after: Duration::ZERO,
            renewal_arrives_after: Mutex::default(),
            settlement_answers_after: Duration::ZERO,
            settled: Arc::default(),
            faults: Arc::default(),
        }
    }

    fn refuses(&self, settlements: &[Settlement<'_, OutboxItem>]) -> bool {
        let mut refused = self.faults.refused.lock().unwrap();
        let is_meant = settlements.iter().any(|settlement| label(&settlement.claimed.item) == refused.0);
        let refuses = is_meant && refused.1 > 0;
        refused.1 -= usize::from(refuses && settlements.len() == 1);
        refuses
    }
}

#[async_trait]
impl Source for Slow {
    type Item = OutboxItem;

    async fn claim(&self, limit: usize) -> Result<Claim<OutboxItem>, StoreError> {
        assert!(!strikes(&self.faults.panics_in_claim), "the test said so");
        let claim = self.source.claim(limit).await?;
        if !claim.items.is_empty() {
            sleep(self.claim_answers_after).await;
        }
        Ok(claim)
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        self.settled.lock().unwrap().push(settlements.len());
        sleep(self.settlement_answers_after).await;
        if strikes(&self.faults.failed_settlements) {
            return Err(failed(FaultKind::Transient));
        }
        if self.refuses(settlements) {
            return Err(failed(FaultKind::Permanent));
        }
        self.source.settle(settlements).await
    }

    async fn renew(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let wait = std::mem::take(&mut *self.renewal_arrives_after.lock().unwrap());
        sleep(wait).await;
        if strikes(&self.faults.failed_renewals) {
            return Err(failed(FaultKind::Transient));
        }
        self.source.renew(claimed).await
    }

    async fn release(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        self.source.release(claimed).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.source.close().await
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn renews_on_own_thread(&self) -> bool {
        self.source.renews_on_own_thread()
    }

    fn wakeup(&self) -> &Wakeup {
        self.source.wakeup()
    }

    fn may_start(&self, claimed: &Claimed<OutboxItem>) -> bool {
        self.source.may_start(claimed)
    }

    async fn revoked(&self) {
        self.source.revoked().await;
    }
}

fn taking(time: Duration) -> RecordingSink {
    RecordingSink::answering(move |_, _| async move {
        sleep(time).await;
        Outcome::Delivered
    })
}

fn label(item: &OutboxItem) -> String {
    String::from_utf8(item.event.payload().as_bytes().to_vec()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_wakeup_delivers_a_new_item_without_waiting_for_the_poll() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    let running = Running::start(&rows, &sink, options()).await;
    sleep(Duration::from_secs(60)).await;
    let before = Instant::now();
    rows.insert("late", None, Duration::ZERO).await;
    sink.wait_for_delivered(1).await;
    assert!(before.elapsed() < Duration::from_millis(10));
    running.stop().await;
    assert_eq!(rows.first().status, OutboxStatus::Done);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_item_is_delivered_when_it_is_due_and_not_before() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    rows.insert("later", None, Duration::from_secs(90)).await;
    let before = Instant::now();
    let running = Running::start(&rows, &sink, options()).await;
    sink.wait_for_delivered(1).await;
    assert!((90_000..90_100).contains(&before.elapsed().as_millis()), "{:?}", before.elapsed());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_hanging_item_does_not_delay_the_others() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|item, _| {
        let hangs = label(item) == "hangs";
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Outcome::Delivered
        }
    });
    rows.insert("hangs", None, Duration::ZERO).await;
    rows.insert_many("fine", 500, None, Duration::ZERO).await;
    let running = Running::start(&rows, &sink, RelayOptions { workers: 2, chunk: 100, ..options() }).await;
    sink.wait_for_delivered(500).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(rows.first().status, OutboxStatus::New);
    assert!(rows.all()[1..].iter().all(|row| row.status == OutboxStatus::Done), "the other items are settled");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_item_is_retried_and_then_dead() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|_, _| async { Outcome::Failed(Failure::transient("503", "down")) });
    rows.insert("bad", None, Duration::ZERO).await;
    let before = Instant::now();
    let running = Running::start(&rows, &sink, options()).await;
    sink.wait_for_started(3).await;
    assert!((2_000..2_100).contains(&before.elapsed().as_millis()), "two retry intervals of a second");
    running.stop().await;
    let row = rows.first();
    assert_eq!((row.status, row.attempts), (OutboxStatus::Dead, 2));
    assert_eq!(row.last_error.unwrap(), "503: down");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_while_its_delivery_runs() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|_, _| async {
        sleep(10 * LEASE).await;
        Outcome::Delivered
    });
    let other = RecordingSink::accepting();
    rows.insert("slow", None, Duration::ZERO).await;
    let first = Running::start(&rows, &sink, options()).await;
    sink.wait_for_started(1).await;
    let second = Running::start(&rows, &other, options()).await;
    sink.wait_for_delivered(1).await;
    first.stop().await;
    second.stop().await;
    let row = rows.first();
    assert_eq!((row.status, row.lease_losses), (OutboxStatus::Done, 0));
    assert!(other.started().is_empty(), "no other node delivered the item");
}

#[tokio::test(start_paused = true)]
async fn after_a_pause_of_its_process_a_relay_does_not_claim_its_own_items_again() {
    let rows = Rows::new().await;
    let sink = taking(3 * LEASE);
    rows.insert("first", None, Duration::ZERO).await;
    let mut source = Slow::new(rows.open().await.dispatcher_source());
    *source.renewal_arrives_after.get_mut().unwrap() = Duration::from_secs(1);
    let running = Running::on(source, &sink, options());
    sink.wait_for_started(1).await;
    // All timers are late, as after SIGSTOP. The new row wakes the claimer before the renewal arrives.
    tokio::time::advance(LEASE + LEASE / 2).await;
    rows.insert("second", None, Duration::ZERO).await;
    sink.wait_for_delivered(2).await;
    running.stop().await;
    let started: Vec<_> = sink.started().iter().map(label).collect();
    assert_eq!(started, ["first", "second"]);
}

#[tokio::test(start_paused = true)]
async fn a_clean_stop_releases_claims_and_another_node_delivers_at_once() {
    let rows = Rows::new().await;
    let busy = RecordingSink::answering(|_, _| async {
        sleep(Duration::from_secs(1)).await;
        Outcome::Delivered
    });
    rows.insert_many("item", 20, None, Duration::ZERO).await;
    let first = Running::start(&rows, &busy, RelayOptions { workers: 1, on_stop: OnStop::Release, ..options() }).await;
    busy.wait_for_started(1).await;
    first.stop().await;
    assert_eq!(busy.delivered().len(), 1, "the delivery in flight is finished, and no other starts");
    let sink = RecordingSink::accepting();
    let before = Instant::now();
    let second = Running::start(&rows, &sink, options()).await;
    sink.wait_for_delivered(19).await;
    assert!(before.elapsed() < Duration::from_secs(1));
    second.stop().await;
    assert_eq!(busy.started().len() + sink.started().len(), 20, "each item is delivered once");
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_delivers_empties_its_queue_first() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|_, _| async {
        sleep(Duration::from_millis(100)).await;
        Outcome::Delivered
    });
    rows.insert_many("item", 20, None, Duration::ZERO).await;
    let options = RelayOptions { workers: 1, on_stop: OnStop::Deliver, ..options() };
    let running = Running::start(&rows, &sink, options).await;
    sink.wait_for_started(1).await;
    running.stop().await;
    assert_eq!(sink.delivered().len(), 20);
    assert!(rows.all().iter().all(|row| row.status == OutboxStatus::Done));
}

#[tokio::test(start_paused = true)]
async fn an_item_of_a_key_waits_for_the_one_before_it() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|item, attempt| {
        let fails = label(item) == "a1" && attempt < 3;
        async move {
            match fails {
                true => Outcome::Failed(Failure::transient("503", "down")),
                false => Outcome::Delivered,
            }
        }
    });
    for (label, key) in [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("a3", "a")] {
        rows.insert(label, Some(key), Duration::ZERO).await;
    }
    let running = Running::start(&rows, &sink, options()).await;
    sink.wait_for_delivered(5).await;
    running.stop().await;
    let delivered: Vec<String> = sink.delivered().iter().map(label).collect();
    let of = |key: char| delivered.iter().filter(|label| label.starts_with(key)).cloned().collect::<Vec<_>>();
    assert_eq!((of('a').join(" "), of('b').join(" ")), ("a1 a2 a3".to_owned(), "b1 b2".to_owned()));
    assert_eq!(delivered[..2], ["b1", "b2"], "a failing head blocks its own key only");
}

#[tokio::test(start_paused = true)]
async fn an_endless_snooze_does_not_stop_the_relay() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|item, _| {
        let never = label(item) == "never";
        async move {
            match never {
                true => Outcome::Snoozed { wait: Duration::MAX },
                false => Outcome::Delivered,
            }
        }
    });
    rows.insert("never", None, Duration::ZERO).await;
    let running = Running::start(&rows, &sink, options()).await;
    sink.wait_for_started(1).await;
    sleep(Duration::from_secs(1)).await;
    rows.insert("next", None, Duration::ZERO).await;
    sink.wait_for_delivered(1).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_claim_is_renewed_before_its_lease_ends() {
    let rows = Rows::new().await;
    let (sink, other) = (taking(Duration::from_secs(20)), RecordingSink::accepting());
    let source = rows.open().await.dispatcher_source();
    let slow = Slow { claim_answers_after: Duration::from_secs(25), ..Slow::new(source) };
    let first = Running::on(slow, &sink, options());
    // Just before a renewal, so that the third renewal after it would be too late.
    sleep(Duration::from_millis(9_500)).await;
    rows.insert("slow", None, Duration::ZERO).await;
    sleep(Duration::from_secs(1)).await;
    let second =
        Running::start(&rows, &other, RelayOptions { poll_interval: Duration::from_millis(100), ..options() }).await;
    sink.wait_for_delivered(1).await;
    first.stop().await;
    second.stop().await;
    assert_eq!((rows.first().status, rows.first().lease_losses), (OutboxStatus::Done, 0));
    assert!(other.started().is_empty(), "no other node delivered the item");
}

#[tokio::test(start_paused = true)]
async fn a_run_of_a_key_stops_when_another_node_claimed_its_head() {
    let rows = Rows::new().await;
    rows.insert("a1", Some("a"), Duration::ZERO).await;
    rows.insert("a2", Some("a"), Duration::ZERO).await;
    let (stale, owner) = (taking(Duration::from_secs(55)), taking(Duration::from_secs(60)));
    let source = rows.open().await.dispatcher_source();
    let slow = Slow { renewal_arrives_after: Mutex::new(Duration::from_secs(40)), ..Slow::new(source) };
    let first = Running::on(slow, &stale, options());
    stale.wait_for_started(1).await;
    let second =
        Running::start(&rows, &owner, RelayOptions { poll_interval: Duration::from_secs(1), ..options() }).await;
    // The lease of a1 is lost after 30 s. The renewal of a2 succeeds at 50 s, and the first node has delivered a1 at 55
    // s.
    sleep(Duration::from_secs(80)).await;
    let labels = |sink: &RecordingSink| sink.started().iter().map(label).collect::<Vec<_>>().join(" ");
    assert_eq!(
        (labels(&stale), labels(&owner)),
        ("a1".to_owned(), "a1".to_owned()),
        "a2 waits for both deliveries of a1"
    );
    while rows.all()[1].status != OutboxStatus::Done {
        sleep(Duration::from_secs(1)).await;
    }
    first.stop().await;
    second.stop().await;
}

/// No caller waits for the settlement of a hot item, and each statement costs the server as much as settling a row.
#[tokio::test(start_paused = true)]
async fn hot_items_are_settled_in_groups() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    rows.insert_many("hot", 100, None, Duration::ZERO).await;
    let source = rows.open().await.dispatcher_source();
    let claimed = source.claim(100).await.unwrap().items;
    let slow = Slow { settlement_answers_after: Duration::from_millis(1), ..Slow::new(source) };
    let settled = slow.settled.clone();
    let options = RelayOptions { settle_linger: Duration::from_millis(10), ..options() };
    let relay = Relay::new("test", Arc::new(slow), Arc::new(sink.clone()), options);
    let (queue, stop) = (relay.hot_queue(100), CancellationToken::new());
    let running = tokio::spawn(relay.run(stop.clone()));
    for claimed in claimed {
        let (deadline, permit) = (queue.deadline(), queue.permit().unwrap());
        assert!(queue.push(vec![(claimed, permit)], deadline).is_ok());
        sleep(Duration::from_millis(1)).await;
    }
    stop.cancel();
    running.await.unwrap();
    assert!(rows.all().iter().all(|row| row.status == OutboxStatus::Done));
    let settled = settled.lock().unwrap().clone();
    assert_eq!(settled[0], 1, "the first settlement is sent at once");
    assert!(settled.len() <= 12, "{settled:?}");
}

#[tokio::test(start_paused = true)]
async fn no_delivery_starts_while_settlements_fail() {
    let rows = Rows::new().await;
    let sink = taking(Duration::from_millis(10));
    rows.insert_many("item", 1_000, None, Duration::ZERO).await;
    let slow = Slow::new(rows.open().await.dispatcher_source());
    let faults = slow.faults.clone();
    faults.failed_settlements.store(usize::MAX, Ordering::Relaxed);
    let running = Running::on(slow, &sink, options());
    sink.wait_for_started(4).await;
    sleep(Duration::from_secs(60)).await;
    let unsettled = sink.started().len();
    assert!(unsettled <= 12, "{unsettled} deliveries would be repeated after a crash");
    faults.failed_settlements.store(0, Ordering::Relaxed);
    sink.wait_for_delivered(1_000).await;
    running.stop().await;
    assert_eq!(sink.started().len(), 1_000, "each item is delivered once");
    assert!(rows.all().iter().all(|row| row.status == OutboxStatus::Done));
}

#[tokio::test(start_paused = true)]
async fn unsettled_deliveries_are_bounded_while_a_settlement_hangs() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    rows.insert_many("item", 2_000, None, Duration::ZERO).await;
    let source = rows.open().await.dispatcher_source();
    let slow = Slow { settlement_answers_after: Duration::from_secs(3), ..Slow::new(source) };
    let running = Running::on(slow, &sink, RelayOptions { settle_batch: 50, ..options() });
    sleep(Duration::from_secs(2)).await;
    let unsettled = sink.started().len();
    assert!(unsettled <= 104, "{unsettled}: more than two batches and one item for each worker");
    running.relay.abort();
}

#[tokio::test(start_paused = true)]
async fn attempts_that_could_not_be_made_do_not_delay_the_others() {
    let rows = Rows::new().await;
    let sink = RecordingSink::answering(|item, _| {
        let is_away = label(item) == "away";
        async move {
            match is_away {
                true => Outcome::Failed(Failure::outage("away", "nothing was sent")),
                false => Outcome::Delivered,
            }
        }
    });
    rows.insert_many("away", 2_000, None, Duration::ZERO).await;
    let source = rows.open().await.dispatcher_source();
    let slow = Slow { settlement_answers_after: Duration::from_millis(300), ..Slow::new(source) };
    let running = Running::on(slow, &sink, RelayOptions { settle_batch: 50, max_in_flight: 4_000, ..options() });
    sink.wait_for_started(2_000).await;
    let began = Instant::now();
    rows.insert("good", None, Duration::ZERO).await;
    sink.wait_for_started(2_001).await;
    assert!(began.elapsed() < Duration::from_millis(300), "it starts although 2,000 outcomes wait to be settled");
    sleep(Duration::from_secs(1)).await;
    let good = rows.all().pop().unwrap();
    assert_eq!(good.status, OutboxStatus::Done, "its outcome is settled before theirs");
    running.relay.abort();
}

#[tokio::test(start_paused = true)]
async fn no_delivery_starts_while_renewals_fail() {
    let rows = Rows::new().await;
    let sink = taking(Duration::from_secs(1));
    rows.insert_many("item", 100, None, Duration::ZERO).await;
    let slow = Slow::new(rows.open().await.dispatcher_source());
    let faults = slow.faults.clone();
    faults.failed_renewals.store(usize::MAX, Ordering::Relaxed);
    let running = Running::on(slow, &sink, RelayOptions { workers: 1, ..options() });
    // The first renewal is sent after a third of the lease.
    sleep(LEASE / 2).await;
    let started = sink.started().len();
    sleep(LEASE / 4).await;
    assert_eq!(sink.started().len(), started, "no delivery starts under a lease that may not be renewed");
    faults.failed_renewals.store(0, Ordering::Relaxed);
    sink.wait_for_delivered(100).await;
    running.stop().await;
    assert_eq!(sink.started().len(), 100, "each item is delivered once");
}

#[tokio::test(start_paused = true)]
async fn a_panicking_claim_is_retried() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    rows.insert_many("item", 3, None, Duration::ZERO).await;
    let slow = Slow::new(rows.open().await.dispatcher_source());
    slow.faults.panics_in_claim.store(3, Ordering::Relaxed);
    let running = Running::on(slow, &sink, options());
    sink.wait_for_delivered(3).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_settlement_is_retried_until_the_store_accepts_it() {
    let (rows, sink) = (Rows::new().await, RecordingSink::accepting());
    rows.insert_many("fine", 10, None, Duration::ZERO).await;
    rows.insert_many("refused", 2, None, Duration::ZERO).await;
    let slow = Slow::new(rows.open().await.dispatcher_source());
    *slow.faults.refused.lock().unwrap() = ("refused", 60);
    let running = Running::on(slow, &sink, options());
    sink.wait_for_delivered(12).await;
    sleep(Duration::from_secs(1)).await;
    assert!(rows.all()[..10].iter().all(|row| row.status == OutboxStatus::Done), "the other items are settled");
    assert!(rows.all()[10..].iter().all(|row| row.status == OutboxStatus::New));
    rows.insert_many("later", 5, None, Duration::ZERO).await;
    sink.wait_for_delivered(17).await;
    while rows.all().iter().any(|row| row.status != OutboxStatus::Done) {
        sleep(LEASE).await;
    }
    running.stop().await;
    assert_eq!(sink.started().len(), 17, "no item was delivered again meanwhile");
}

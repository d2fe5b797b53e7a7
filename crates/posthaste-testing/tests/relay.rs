//! The engine's promises one by one, on the store and the sink in memory and on a clock that tests own.

use std::sync::Arc;
use std::time::Duration;

use posthaste_core::{Failure, OnStop, Outcome, Relay, RelayOptions, RetryPolicy};
use posthaste_testing::{MemoryItem, MemorySink, MemoryStatus, MemoryStore};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

const LEASE: Duration = Duration::from_secs(30);

type Store = MemoryStore<&'static str>;
type RecordingSink = MemorySink<MemoryItem<&'static str>>;

struct Running {
    relay: JoinHandle<()>,
    stop: CancellationToken,
}

impl Running {
    fn start(store: &Store, sink: &RecordingSink, options: RelayOptions) -> Self {
        let stop = CancellationToken::new();
        let relay = Relay::new("test", Arc::new(store.source()), Arc::new(sink.clone()), options);
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

fn insert_many(store: &Store, label: &'static str, count: usize) {
    for _ in 0..count {
        store.insert(label, None, Duration::ZERO);
    }
}

fn labels(items: &[MemoryItem<&'static str>]) -> Vec<&'static str> {
    items.iter().map(|item| *item.item).collect()
}

fn status(store: &Store, seq: u64) -> MemoryStatus {
    store.row(seq).unwrap().status
}

#[tokio::test(start_paused = true)]
async fn a_wake_up_and_not_the_poll_brings_a_new_item() {
    let (store, sink) = (Store::new(LEASE), RecordingSink::accepting());
    let running = Running::start(&store, &sink, options());
    tokio::time::sleep(Duration::from_secs(60)).await;
    let before = Instant::now();
    store.insert("late", None, Duration::ZERO);
    sink.wait_for_delivered(1).await;
    assert!(before.elapsed() < Duration::from_millis(10));
    running.stop().await;
    assert_eq!(status(&store, 0), MemoryStatus::Done);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_item_comes_when_it_is_due_and_not_before() {
    let (store, sink) = (Store::new(LEASE), RecordingSink::accepting());
    store.insert("later", None, Duration::from_secs(90));
    let before = Instant::now();
    let running = Running::start(&store, &sink, options());
    sink.wait_for_delivered(1).await;
    assert!((90_000..90_100).contains(&before.elapsed().as_millis()), "{:?}", before.elapsed());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_hanging_item_never_holds_the_others() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|item, _| {
        let hangs = *item.item == "hangs";
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Outcome::Delivered
        }
    });
    store.insert("hangs", None, Duration::ZERO);
    insert_many(&store, "fine", 500);
    let running = Running::start(&store, &sink, RelayOptions { workers: 2, chunk: 100, ..options() });
    sink.wait_for_delivered(500).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(status(&store, 0), MemoryStatus::New);
    assert!((1..=500).all(|seq| status(&store, seq) == MemoryStatus::Done), "the others are on record, too");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_item_is_retried_and_then_dead() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|_, _| async { Outcome::Failed(Failure::transient("503", "down")) });
    store.insert("bad", None, Duration::ZERO);
    let before = Instant::now();
    let running = Running::start(&store, &sink, options());
    sink.wait_for_started(3).await;
    assert!((2_000..2_100).contains(&before.elapsed().as_millis()), "two waits of a second");
    running.stop().await;
    let row = store.row(0).unwrap();
    assert_eq!((row.status, row.attempts), (MemoryStatus::Dead, 2));
    assert_eq!(row.last_failure.unwrap().code, "503");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_while_its_delivery_runs() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|_, _| async {
        tokio::time::sleep(10 * LEASE).await;
        Outcome::Delivered
    });
    let other = RecordingSink::accepting();
    store.insert("slow", None, Duration::ZERO);
    let first = Running::start(&store, &sink, options());
    sink.wait_for_started(1).await;
    let second = Running::start(&store, &other, options());
    sink.wait_for_delivered(1).await;
    first.stop().await;
    second.stop().await;
    let row = store.row(0).unwrap();
    assert_eq!((row.status, row.lease_losses), (MemoryStatus::Done, 0));
    assert!(other.started().is_empty(), "nobody else had it");
}

#[tokio::test(start_paused = true)]
async fn a_clean_stop_releases_claims_and_another_node_delivers_at_once() {
    let store = Store::new(LEASE);
    let busy = RecordingSink::answering(|_, _| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Outcome::Delivered
    });
    insert_many(&store, "item", 20);
    let first = Running::start(&store, &busy, RelayOptions { workers: 1, on_stop: OnStop::Release, ..options() });
    busy.wait_for_started(1).await;
    first.stop().await;
    assert_eq!(busy.delivered().len(), 1, "what was begun is finished, and nothing else begun");
    let sink = RecordingSink::accepting();
    let before = Instant::now();
    let second = Running::start(&store, &sink, options());
    sink.wait_for_delivered(19).await;
    assert!(before.elapsed() < Duration::from_secs(1));
    second.stop().await;
    assert_eq!(busy.started().len() + sink.started().len(), 20, "one delivery each");
}

#[tokio::test(start_paused = true)]
async fn a_stop_that_delivers_empties_its_queue_first() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|_, _| async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Outcome::Delivered
    });
    insert_many(&store, "item", 20);
    let options = RelayOptions { workers: 1, on_stop: OnStop::Deliver, ..options() };
    let running = Running::start(&store, &sink, options);
    sink.wait_for_started(1).await;
    running.stop().await;
    assert_eq!(sink.delivered().len(), 20);
    assert!((0..20).all(|seq| status(&store, seq) == MemoryStatus::Done));
}

#[tokio::test(start_paused = true)]
async fn an_item_of_a_key_waits_for_the_one_before_it() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|item, attempt| {
        let fails = *item.item == "a1" && attempt < 3;
        async move {
            match fails {
                true => Outcome::Failed(Failure::transient("503", "down")),
                false => Outcome::Delivered,
            }
        }
    });
    for (label, key) in [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("a3", "a")] {
        store.insert(label, Some(key), Duration::ZERO);
    }
    let running = Running::start(&store, &sink, options());
    sink.wait_for_delivered(5).await;
    running.stop().await;
    let delivered = labels(&sink.delivered());
    let of = |key: char| delivered.iter().copied().filter(|label| label.starts_with(key)).collect::<Vec<_>>();
    assert_eq!((of('a'), of('b')), (vec!["a1", "a2", "a3"], vec!["b1", "b2"]));
    assert_eq!(delivered[..2], ["b1", "b2"], "a failing head blocks its own key only");
}

#[tokio::test(start_paused = true)]
async fn an_endless_wait_is_a_long_one() {
    let store = Store::new(LEASE);
    let sink = RecordingSink::answering(|item, _| {
        let never = *item.item == "never";
        async move {
            match never {
                true => Outcome::Snoozed { wait: Duration::MAX },
                false => Outcome::Delivered,
            }
        }
    });
    store.insert("never", None, Duration::ZERO);
    let running = Running::start(&store, &sink, options());
    sink.wait_for_started(1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    store.insert("next", None, Duration::ZERO);
    sink.wait_for_delivered(1).await;
    running.stop().await;
}

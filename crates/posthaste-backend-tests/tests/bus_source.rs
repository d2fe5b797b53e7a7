//! A relay on a bus: retries in memory, dead letters before the ack, and quarantine of unreadable records.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_backend_tests::{MemoryBus, MemorySink};
use posthaste_core::bus::{Bus, Consumer, Fetched, MAX_RECORD, PublishError, Record, Topics, route};
use posthaste_core::log::LogOptions;
use posthaste_core::{
    BusItem, BusSource, BusSourceOptions, DecodeError, Decoded, Disposition, Failure, FaultKind, GivenUp, Load,
    Outcome, Relay, RelayOptions, RetryPolicy, Settled, Settlement, Source, StoreError,
};
use tokio_util::sync::CancellationToken;

type Sink = MemorySink<BusItem<String>>;

/// A bus that refuses the first few dead letters.
struct Refusing {
    bus: MemoryBus,
    refusals: AtomicUsize,
}

#[async_trait]
impl Bus for Refusing {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        let refuse = self.refusals.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        match refuse {
            Ok(_) => {
                let full = StoreError::new("publish", FaultKind::Transient, std::io::Error::other("full"));
                vec![Err(PublishError::Unavailable(Arc::new(full))); records.len()]
            }
            Err(_) => self.bus.publish(records).await,
        }
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        self.bus.subscribe(group, topics).await
    }
}

struct World {
    bus: MemoryBus,
    stop: CancellationToken,
    relay: tokio::task::JoinHandle<()>,
}

impl World {
    /// Publishes `values` and relays them to `sink`. The dead-letter topic does not accept the first records.
    async fn start(values: &[&[u8]], sink: &Sink, refusals: usize) -> Self {
        Self::start_with(values, sink, refusals, Arc::default()).await
    }

    /// [`start`](Self::start), with a decoder that fails for as many values that begin with "strange".
    async fn start_with(values: &[&[u8]], sink: &Sink, refusals: usize, outages: Arc<AtomicUsize>) -> Self {
        let bus = MemoryBus::new(1, Duration::from_secs(30));
        publish(&bus, values).await;
        let source = source(&bus, refusals, outages).await;
        let relay = RelayOptions {
            retry: RetryPolicy::Fixed { interval: Duration::from_millis(100), max_attempts: Some(3) },
            poll_interval: Duration::from_millis(500),
            ..RelayOptions::default()
        };
        let stop = CancellationToken::new();
        let relay = Relay::new("test", Arc::new(source), Arc::new(sink.clone()), relay);
        Self { bus, relay: tokio::spawn(relay.run(stop.clone())), stop }
    }

    async fn dead(&self, count: usize) -> Vec<String> {
        loop {
            let dead = self.bus.records("dead");
            if dead.len() >= count {
                return dead.iter().map(|record| String::from_utf8_lossy(&record.value).into_owned()).collect();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Stops the relay, and returns the number of records that the group has not acked.
    async fn stop(self) -> usize {
        self.stop.cancel();
        self.relay.await.unwrap();
        let next = self.bus.subscribe("group", Topics::Named(vec!["in".to_owned()])).await.unwrap();
        next.fetch(1_000).await.unwrap().len()
    }
}

/// A source of the group, whose dead-letter topic does not accept the first records.
async fn source(bus: &MemoryBus, refusals: usize, outages: Arc<AtomicUsize>) -> BusSource<String> {
    let refusing = Arc::new(Refusing { bus: bus.clone(), refusals: AtomicUsize::new(refusals) });
    let consumer = bus.subscribe("group", Topics::Named(vec!["in".to_owned()])).await.unwrap();
    let options = BusSourceOptions {
        decode: Box::new(move |record| {
            let outages = outages.clone();
            Box::pin(async move { decode(record, &outages) })
        }),
        dead_letter: Some(Box::new(|item: &BusItem<String>, given_up| {
            let value = match item.value.starts_with("large") {
                true => vec![b'x'; MAX_RECORD + 1],
                false => describe(&item.value, given_up).into_bytes(),
            };
            let (topic, key, headers) = ("dead".into(), String::new(), Vec::new());
            Box::pin(ready(Ok(Record { topic, route: 0, key, value: value.into(), headers })))
        })),
        defer_after: Duration::from_secs(2),
        max_waiting: Load { items: 100, bytes: 1_000_000 },
    };
    BusSource::new("group", refusing, consumer, Arc::new(bus.clone()), options)
}

fn decode(record: &Fetched, outages: &AtomicUsize) -> Result<Decoded<String>, DecodeError> {
    let text = String::from_utf8(record.value.to_vec()).map_err(|error| DecodeError::Poison(error.to_string()))?;
    let fail = |left: usize| left.checked_sub(1);
    if text.starts_with("strange") && outages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fail).is_ok() {
        let away = StoreError::new("look up schema 7", FaultKind::Transient, std::io::Error::other("away"));
        return Err(DecodeError::Outage(away));
    }
    let fair_key = text.split(' ').next().map(Into::into);
    Ok(Decoded { value: text, budget: None, fair_key })
}

async fn publish(bus: &MemoryBus, values: &[&[u8]]) {
    let record = |value: &&[u8]| Record {
        topic: "in".into(),
        route: route(&["one"]),
        key: String::new(),
        value: Bytes::copy_from_slice(value),
        headers: Vec::new(),
    };
    assert!(bus.publish(values.iter().map(record).collect()).await.iter().all(Result::is_ok));
}

fn describe(value: &str, given_up: &GivenUp) -> String {
    let deferred = if given_up.is_deferred { " deferred" } else { "" };
    format!("{value} {} {}{deferred}", given_up.attempts, given_up.failure.code)
}

#[tokio::test(start_paused = true)]
async fn a_record_is_dead_lettered_before_it_is_acked_and_not_delivered_again_meanwhile() {
    let sink = Sink::answering(|item, _| {
        let bad = *item.value == "bad";
        async move {
            match bad {
                true => Outcome::Failed(Failure::transient("503", "down")),
                false => Outcome::Delivered,
            }
        }
    });
    let world = World::start(&[b"bad", b"good"], &sink, 5).await;
    assert_eq!(world.dead(1).await, ["bad 3 503"]);
    assert_eq!(world.stop().await, 0, "both records are acked");
    assert_eq!(
        sink.started().len(),
        4,
        "three attempts and one, although publishing the dead letter failed several times"
    );
}

#[tokio::test(start_paused = true)]
async fn a_long_delay_or_an_outage_moves_a_record_to_the_dead_letters() {
    let sink = Sink::answering(|item, _| {
        let failure = match item.value.as_str() {
            "later" => Failure::transient("429", "slow down").retry_after(Duration::from_secs(60)),
            _ => Failure::outage("sealed", "no key"),
        };
        async move { Outcome::Failed(failure) }
    });
    let world = World::start(&[b"later", b"sealed"], &sink, 0).await;
    let mut dead = world.dead(2).await;
    dead.sort();
    assert_eq!(dead, ["later 1 429 deferred", "sealed 0 sealed deferred"], "an outage does not count as an attempt");
    assert_eq!(world.stop().await, 0);
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_record_is_quarantined_and_the_others_are_delivered() {
    let sink = Sink::accepting();
    let world = World::start(&[b"one", &[0xff, 0xfe], b"two"], &sink, 0).await;
    sink.wait_for_delivered(2).await;
    let bus = world.bus.clone();
    assert_eq!(world.stop().await, 0);
    let quarantined = bus.quarantined();
    assert_eq!(quarantined.len(), 1);
    assert!(format!("{quarantined:?}").contains("utf-8"), "{quarantined:?}");
}

#[tokio::test(start_paused = true)]
async fn a_record_that_cannot_be_decoded_now_waits_and_the_others_are_delivered() {
    let sink = Sink::accepting();
    let values: [&[u8]; 5] = [b"one", b"strange 1", b"two", b"strange 2", b"three"];
    // More failures than the list has records of that kind, so each is tried several times.
    let outages = Arc::new(AtomicUsize::new(40));
    let world = World::start_with(&values, &sink, 0, outages.clone()).await;
    sink.wait_for_delivered(3).await;
    assert!(outages.load(Ordering::Relaxed) > 0, "the others did not wait for the outage to end");
    sink.wait_for_delivered(5).await;
    let bus = world.bus.clone();
    assert_eq!(world.stop().await, 0);
    assert!(bus.quarantined().is_empty(), "an outage quarantines nothing");
    assert_eq!(sink.started().len(), 5, "each is delivered once");
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_the_bus_refuses_is_quarantined_and_the_others_are_published() {
    let sink = Sink::answering(|_, _| async { Outcome::Failed(Failure::permanent("410", "gone")) });
    let world = World::start(&[b"small 1", b"large", b"small 2"], &sink, 0).await;
    let mut dead = world.dead(2).await;
    dead.sort();
    assert_eq!(dead, ["small 1 1 410", "small 2 1 410"]);
    let bus = world.bus.clone();
    assert_eq!(world.stop().await, 0, "all records are acked");
    let quarantined = bus.quarantined();
    assert_eq!(quarantined.len(), 1);
    let (_, poison) = &quarantined[0];
    assert!(poison.reason.contains("more than") && poison.reason.contains("gone"), "{}", poison.reason);
}

#[tokio::test(start_paused = true)]
async fn retries_that_exceed_the_share_of_their_key_are_deferred_and_others_wait_in_memory() {
    let sink = Sink::answering(|item, attempt| {
        let is_down = item.value.starts_with("down") || attempt == 1;
        async move {
            match is_down {
                true => Outcome::Failed(Failure::transient("503", "down")),
                false => Outcome::Delivered,
            }
        }
    });
    let down: Vec<String> = (0..100).map(|number| format!("down {number}")).collect();
    let mut values: Vec<&[u8]> = down.iter().map(|value| value.as_bytes()).collect();
    values.push(b"shaky");
    let world = World::start(&values, &sink, 0).await;
    let dead = world.dead(100).await;
    let deferred = dead.iter().filter(|dead| dead.ends_with(" 1 503 deferred")).count();
    assert_eq!(deferred, 89, "an eighth of what is left waits in memory");
    assert_eq!(dead.iter().filter(|dead| dead.ends_with(" 3 503")).count(), 11, "the others had all attempts");
    assert_eq!(world.stop().await, 0, "all records are acked");
    assert_eq!(sink.started().len(), 89 + 3 * 11 + 2, "the record of another key is retried from memory");
}

/// A relay of the group on a bus of its own, as in another process.
fn start_member(bus: &MemoryBus, sink: &Sink) -> (CancellationToken, tokio::task::JoinHandle<()>) {
    let (bus, sink, stop) = (bus.another(LogOptions::default()), sink.clone(), CancellationToken::new());
    let stopped = stop.clone();
    let relay = tokio::spawn(async move {
        let consumer = bus.subscribe("group", Topics::Named(vec!["in".to_owned()])).await.unwrap();
        let options = BusSourceOptions {
            decode: Box::new(|record| Box::pin(async move { decode(record, &AtomicUsize::new(0)) })),
            dead_letter: None,
            defer_after: Duration::MAX,
            max_waiting: Load { items: 100, bytes: 1_000_000 },
        };
        let source = BusSource::new("group", Arc::new(bus.clone()), consumer, Arc::new(bus), options);
        let options = RelayOptions {
            // Most claimed records wait for a worker, and some for a retry.
            workers: 2,
            retry: RetryPolicy::Fixed { interval: Duration::from_secs(1), max_attempts: None },
            poll_interval: Duration::from_millis(500),
            ..RelayOptions::default()
        };
        Relay::new("test", Arc::new(source), Arc::new(sink), options).run(stopped).await;
    });
    (stop, relay)
}

#[tokio::test(start_paused = true)]
async fn a_rebalance_without_a_crash_delivers_nothing_twice() {
    const RECORDS: usize = 300;
    let bus = MemoryBus::new(6, Duration::from_secs(30));
    let record = |number: usize| Record {
        topic: "in".into(),
        route: number as u64,
        key: String::new(),
        value: Bytes::from(format!("value {number}")),
        headers: Vec::new(),
    };
    assert!(bus.publish((0..RECORDS).map(record).collect()).await.iter().all(Result::is_ok));
    // Every tenth record fails at first, so that it waits for a retry when the partitions move.
    let failed = Arc::new(std::sync::Mutex::new(std::collections::HashSet::new()));
    let sink = Sink::answering(move |item, _| {
        let is_first = item.value.ends_with('5') && failed.lock().unwrap().insert(item.value.clone());
        async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            match is_first {
                true => Outcome::Failed(Failure::transient("503", "down")),
                false => Outcome::Delivered,
            }
        }
    });
    let (stop_first, first) = start_member(&bus, &sink);
    sink.wait_for_delivered(20).await;
    let (stop_second, second) = start_member(&bus, &sink);
    sink.wait_for_delivered(100).await;
    let (stop_third, third) = start_member(&bus, &sink);
    sink.wait_for_delivered(180).await;
    stop_first.cancel();
    first.await.unwrap();
    sink.wait_for_delivered(RECORDS).await;
    [stop_second, stop_third].iter().for_each(CancellationToken::cancel);
    second.await.unwrap();
    third.await.unwrap();
    assert_eq!(sink.delivered().len(), RECORDS, "each is delivered once");
    assert_eq!(sink.started().len(), RECORDS + 30, "only the failed attempts are repeated");
}

/// A process that was paused past its lease gives up on a record that another process has by now.
#[tokio::test(start_paused = true)]
async fn a_record_that_another_consumer_has_becomes_no_dead_letter() {
    let lease = Duration::from_secs(30);
    let bus = MemoryBus::new(1, lease);
    publish(&bus, &[b"one", b"two"]).await;
    let paused = source(&bus, 0, Arc::default()).await;
    let claimed = paused.claim(10).await.unwrap().items;
    assert_eq!(claimed.len(), 2);
    let failure = Failure::permanent("gone", "the endpoint is gone");
    let dead = Disposition::Dead(failure);
    let settlement = |claimed| Settlement { claimed, disposition: &dead, took: Duration::ZERO };
    assert_eq!(paused.settle(&[settlement(&claimed[0])]).await.unwrap(), [Settled::Applied]);
    assert_eq!(bus.records("dead").len(), 1, "it has the lease");

    tokio::time::advance(lease * 2).await;
    let other = source(&bus, 0, Arc::default()).await;
    assert_eq!(other.claim(10).await.unwrap().items.len(), 1);
    assert_eq!(paused.settle(&[settlement(&claimed[1])]).await.unwrap(), [Settled::LostLease]);
    assert_eq!(bus.records("dead").len(), 1, "the other process has the record");
}

#[tokio::test(start_paused = true)]
async fn unreadable_records_in_memory_are_limited_while_the_quarantine_is_away() {
    const UNREADABLE: usize = 500;
    let bus = MemoryBus::new(1, Duration::from_secs(30));
    publish(&bus, &[&[0xff, 0xfe][..]; UNREADABLE]).await;
    publish(&bus, &[b"good"]).await;
    let source = source(&bus, 0, Arc::default()).await;
    bus.set_quarantine_away(true);
    for _ in 0..100 {
        assert!(source.claim(50).await.unwrap().items.is_empty(), "the good record is behind too many others");
    }
    bus.set_quarantine_away(false);
    let mut claimed = Vec::new();
    for _ in 0..20 {
        claimed.extend(source.claim(50).await.unwrap().items);
    }
    assert_eq!(claimed.len(), 1, "it goes on");
    assert_eq!(bus.quarantined().len(), UNREADABLE);
}

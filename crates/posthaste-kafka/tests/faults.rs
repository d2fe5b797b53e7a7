//! A broker that crashes while records are published, read and acked.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use posthaste_backend_tests::servers::Kafka;
use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Record, Topics};
use posthaste_kafka::{KafkaBus, KafkaOptions};

const PATIENCE: Duration = Duration::from_secs(120);
const CRASHES: usize = 2;

fn bus(broker: &str) -> KafkaBus {
    let options =
        KafkaOptions { brokers: vec![broker.to_owned()], partitions: 4, replication: 1, ..KafkaOptions::default() };
    KafkaBus::new(options).unwrap()
}

fn record(number: usize) -> Record {
    let key = number.to_string();
    Record { topic: "orders".into(), route: number as u64, value: Bytes::from(key.clone()), key, headers: Vec::new() }
}

/// Publishes until it is told to stop. Publishes a record again until the bus accepts it. Returns the number of records.
async fn publish(bus: KafkaBus, stop: Arc<AtomicBool>, accepted: Arc<AtomicUsize>) -> usize {
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut batch: Vec<Record> = (next..next + 50).map(record).collect();
        next += batch.len();
        while !batch.is_empty() {
            let results = bus.publish(batch.clone()).await;
            let mut left = Vec::new();
            for (record, result) in batch.into_iter().zip(results) {
                match result {
                    Ok(()) => _ = accepted.fetch_add(1, Ordering::Relaxed),
                    Err(_) => left.push(record),
                }
            }
            batch = left;
        }
        // Not faster: a partition pauses when too many records are done above one that is not.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    next
}

#[derive(Default)]
struct Seen {
    keys: BTreeSet<usize>,
    acked: BTreeSet<(u32, i64)>,
    unacked: BTreeSet<(u32, i64)>,
}

fn place(position: &Position) -> (u32, i64) {
    (position.partition, position.offset)
}

/// Reads until it is told to stop. Leaves every tenth record unacked.
async fn read(consumer: &dyn Consumer, seen: &Mutex<Seen>, is_enough: impl Fn(&Seen) -> bool) {
    let give_up = Instant::now() + PATIENCE;
    while !is_enough(&seen.lock().unwrap()) {
        assert!(Instant::now() < give_up, "{} keys were read", seen.lock().unwrap().keys.len());
        let fetched = consumer.fetch(100).await.unwrap();
        if fetched.is_empty() {
            // Nothing is there yet. The wake-up may have been for records that were fetched already.
            let _ = tokio::time::timeout(Duration::from_millis(100), consumer.wakeup().signalled()).await;
            continue;
        }
        let (kept, done): (Vec<&Fetched>, Vec<&Fetched>) =
            fetched.iter().partition(|fetched| fetched.position.offset % 10 == 3);
        let positions: Vec<&Position> = done.iter().map(|fetched| &fetched.position).collect();
        let settled = consumer.ack(&positions).await.unwrap();
        let mut seen = seen.lock().unwrap();
        for fetched in &fetched {
            seen.keys.insert(fetched.key.parse().unwrap());
        }
        for (position, settled) in positions.into_iter().zip(settled) {
            if settled == Settled::Applied {
                seen.unacked.remove(&place(position));
                seen.acked.insert(place(position));
            }
        }
        let kept = kept.into_iter().map(|fetched| place(&fetched.position));
        let kept: Vec<_> = kept.filter(|place| !seen.acked.contains(place)).collect();
        seen.unacked.extend(kept);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_crashes_loses_no_record_and_repeats_no_acked_one() {
    let mut kafka = Kafka::start().await;
    let (stop, accepted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let publishing = tokio::spawn(publish(bus(kafka.url()), Arc::clone(&stop), Arc::clone(&accepted)));
    let first = bus(kafka.url()).subscribe("group", Topics::Named(vec!["orders".to_owned()])).await.unwrap();
    let seen = Arc::new(Mutex::new(Seen::default()));
    for _ in 0..CRASHES {
        let target = seen.lock().unwrap().keys.len() + 500;
        read(&*first, &seen, |seen| seen.keys.len() >= target).await;
        // Records are published and acks are committed while the broker is away.
        let reading = async {
            let target = seen.lock().unwrap().keys.len() + 200;
            read(&*first, &seen, |seen| seen.keys.len() >= target).await;
        };
        tokio::join!(kafka.restart(), reading);
    }
    stop.store(true, Ordering::Relaxed);
    let count = publishing.await.unwrap();
    assert_eq!(accepted.load(Ordering::Relaxed), count);
    read(&*first, &seen, |seen| seen.keys.len() >= count).await;
    first.close().await.unwrap();
    let before = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(before.keys, (0..count).collect(), "every record that was accepted is read, and no other");

    // The next reader gets every record that was not acked, and no other.
    let second = bus(kafka.url()).subscribe("group", Topics::Named(vec!["orders".to_owned()])).await.unwrap();
    let mut again = BTreeMap::new();
    let give_up = Instant::now() + PATIENCE;
    while again.len() < before.unacked.len() {
        assert!(Instant::now() < give_up, "{} of {} records came", again.len(), before.unacked.len());
        for fetched in second.fetch(100).await.unwrap() {
            assert!(!before.acked.contains(&place(&fetched.position)), "{} was acked", fetched.key);
            again.insert(place(&fetched.position), fetched.key);
        }
        let _ = tokio::time::timeout(Duration::from_millis(20), second.wakeup().signalled()).await;
    }
    assert_eq!(again.into_keys().collect::<BTreeSet<_>>(), before.unacked);
    second.close().await.unwrap();
}

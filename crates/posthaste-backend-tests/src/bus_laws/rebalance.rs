//! The laws about readers that come and go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use posthaste_core::Settled;
use posthaste_core::bus::{Bus, Consumer, Fetched, Position, Record, Topics};

use super::{
    BusHarness, DEADLINE, LONG_LEASE, assert_nothing, keys, numbered, pause, positions, publish, read, record,
};

/// Every reader of a group gets its share of the partitions, also when readers come and go. Nothing is read twice: no
/// reader crashes.
pub async fn partitions_are_balanced_over_the_readers_of_a_group(harness: &impl BusHarness) {
    const TOPICS: u64 = 6;
    let bus = harness.open_with(LONG_LEASE).await;
    let mut group = Group { readers: Vec::new(), seen: BTreeSet::new() };
    let mut round = 0;
    for readers in [1, 3, 2] {
        while group.readers.len() > readers {
            group.readers.remove(0).close().await.unwrap();
        }
        while group.readers.len() < readers {
            let other = harness.open_with(LONG_LEASE).await;
            group.readers.push(other.subscribe("group", Topics::Prefix("t".to_owned())).await.unwrap());
        }
        let give_up = Instant::now() + DEADLINE;
        loop {
            // One record for each partition, if there are at most four in a topic.
            let record = |n| record(&format!("t{}", n / 4), n % 4, format!("{round} {n}"));
            publish(&bus, (0..4 * TOPICS).map(record).collect()).await;
            let partitions = group.read_round(4 * TOPICS as usize).await;
            let counts = partitions.iter().map(BTreeSet::len);
            if counts.clone().max().unwrap() - counts.min().unwrap() <= 1 {
                break;
            }
            assert!(Instant::now() < give_up, "{readers} readers have these partitions: {partitions:?}");
            round += 1;
        }
        round += 1;
    }
}

/// The readers of one group.
struct Group {
    readers: Vec<Box<dyn Consumer>>,
    seen: BTreeSet<String>,
}

impl Group {
    /// Lets all readers read and ack until they have read this many records. Returns the partitions that each has read.
    async fn read_round(&mut self, count: usize) -> Vec<BTreeSet<(Arc<str>, u32)>> {
        let mut partitions = vec![BTreeSet::new(); self.readers.len()];
        let (deadline, target) = (Instant::now() + DEADLINE, self.seen.len() + count);
        while self.seen.len() < target {
            assert!(Instant::now() < deadline, "{} of {target} records came", self.seen.len());
            for (reader, partitions) in self.readers.iter().zip(&mut partitions) {
                let fetched = reader.fetch(5).await.unwrap();
                for one in &fetched {
                    partitions.insert((Arc::clone(&one.position.topic), one.position.partition));
                    assert!(self.seen.insert(one.key.clone()), "{} was read twice", one.key);
                }
                let acked = reader.ack(&positions(&fetched)).await.unwrap();
                assert_eq!(acked, vec![Settled::Applied; fetched.len()], "nothing is lost in a rebalance");
            }
            pause().await;
        }
        partitions
    }
}

/// When another reader joins, some partitions are revoked. The other reader gets them when every record in flight is
/// acked or released, and then reads only what was not acked.
pub async fn a_revoked_partition_is_given_up_when_its_records_are_acked_or_released(harness: &impl BusHarness) {
    let bus = harness.open_with(LONG_LEASE).await;
    for topic in ["t0", "t1"] {
        publish(&bus, numbered(topic, 0..20)).await;
    }
    let first = bus.subscribe("group", Topics::Prefix("t".to_owned())).await.unwrap();
    let seen = read(&*first, 40).await;
    assert!(seen.iter().all(|fetched| first.may_start(&fetched.position)));
    let second = harness.open_with(LONG_LEASE).await.subscribe("group", Topics::Prefix("t".to_owned())).await.unwrap();
    let deadline = Instant::now() + DEADLINE;
    while seen.iter().all(|fetched| first.may_start(&fetched.position)) {
        assert!(Instant::now() < deadline, "no partition was revoked");
        assert_nothing(&*first).await;
        assert_nothing(&*second).await;
        pause().await;
    }
    first.revocations().signalled().await;
    let (kept, revoked): (Vec<_>, Vec<_>) = seen.iter().partition(|fetched| first.may_start(&fetched.position));
    assert!(!kept.is_empty(), "only a share of the partitions is revoked");
    assert_nothing(&*second).await;
    let (done, undone): (Vec<&Fetched>, Vec<&Fetched>) =
        revoked.into_iter().partition(|fetched| fetched.position.offset % 2 == 0);
    let done: Vec<&Position> = done.into_iter().map(|fetched| &fetched.position).collect();
    assert_eq!(first.ack(&done).await.unwrap(), vec![Settled::Applied; done.len()], "records in flight may be acked");
    first.release(&undone.iter().map(|fetched| &fetched.position).collect::<Vec<_>>());
    let mut handed_over = Vec::new();
    while handed_over.len() < undone.len() {
        assert!(Instant::now() < deadline, "{} of {} records were handed over", handed_over.len(), undone.len());
        assert_nothing(&*first).await;
        handed_over.extend(second.fetch(7).await.unwrap());
        pause().await;
    }
    assert_eq!(keys(&handed_over), undone.iter().map(|fetched| fetched.key.clone()).collect());
    let kept: Vec<&Position> = kept.into_iter().map(|fetched| &fetched.position).collect();
    assert_eq!(first.ack(&kept).await.unwrap(), vec![Settled::Applied; kept.len()]);
}

/// So many records are in flight that their completed set could become too long, when partitions are revoked. The next
/// reader reads what was not acked, and then what was not read because the partition was paused.
pub async fn a_paused_partition_that_is_revoked_is_read_further_by_its_next_reader(harness: &impl BusHarness) {
    const REST: u64 = 50;
    // Six offsets need one character, see `Assignment`.
    let limit = (harness.max_completed_text() as u64 - 4) * 6 + 1;
    let bus = harness.open_with(LONG_LEASE).await;
    for topic in ["t0", "t1"] {
        for from in (0..limit + REST).step_by(5_000) {
            let numbers = from..(from + 5_000).min(limit + REST);
            let records =
                numbers.map(|n| Record { headers: Vec::new(), ..record(topic, 0, format!("{topic} {n:06}")) });
            publish(&bus, records.collect()).await;
        }
    }
    let topics = || Topics::Prefix("t".to_owned());
    let first = bus.subscribe("group", topics()).await.unwrap();
    let seen = read_many(&*first, 2 * limit as usize).await;
    assert_nothing(&*first).await;
    let second = harness.open_with(LONG_LEASE).await.subscribe("group", topics()).await.unwrap();
    let deadline = Instant::now() + DEADLINE;
    while seen.iter().all(|fetched| first.may_start(&fetched.position)) {
        assert!(Instant::now() < deadline, "no partition was revoked");
        assert_nothing(&*first).await;
        assert_nothing(&*second).await;
        pause().await;
    }
    let (kept, revoked): (Vec<_>, Vec<_>) = seen.into_iter().partition(|fetched| first.may_start(&fetched.position));
    let (done, undone): (Vec<_>, Vec<_>) = revoked.into_iter().partition(|fetched| fetched.position.offset % 2 == 1);
    assert_eq!(first.ack(&positions(&done)).await.unwrap(), vec![Settled::Applied; done.len()]);
    first.release(&positions(&undone));
    assert_nothing(&*first).await;
    let again = read_many(&*second, undone.len()).await;
    assert_eq!(keys(&again), keys(&undone));
    for (reader, seen) in [(&first, kept), (&second, again)] {
        assert_eq!(reader.ack(&positions(&seen)).await.unwrap(), vec![Settled::Applied; seen.len()]);
        let rest = read_many(&**reader, REST as usize).await;
        assert!(rest.iter().all(|fetched| fetched.position.offset >= limit as i64), "{:?}", keys(&rest));
    }
}

/// Fetches until it has exactly this many records, many at once.
async fn read_many(consumer: &dyn Consumer, count: usize) -> Vec<Fetched> {
    let mut seen = Vec::with_capacity(count);
    let mut deadline = Instant::now() + DEADLINE;
    while seen.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} records came", seen.len());
        let fetched = consumer.fetch(1_000).await.unwrap();
        match fetched.is_empty() {
            true => pause().await,
            false => deadline = Instant::now() + DEADLINE,
        }
        seen.extend(fetched);
    }
    assert_eq!(seen.len(), count);
    seen
}

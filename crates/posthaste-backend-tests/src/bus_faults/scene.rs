use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use posthaste_core::bus::Bus;
use tempfile::TempDir;

use super::member::is_held;
use super::publisher::Publisher;
use super::rest::read_rest;
use super::{Address, Delivered, Done, Entry, Fault, Faulty, FaultyBus, History, Member, Place, Step};
use crate::processes::{DiaryReader, Process, now_millis, wait_until};

/// A group whose members deliver the records that a publisher publishes all the time.
pub struct Scene<B> {
    address: Address,
    lease: Duration,
    bus: Arc<dyn Bus>,
    publisher: Publisher,
    folder: TempDir,
    diaries: Vec<DiaryReader<Entry>>,
    kind: PhantomData<fn(B)>,
}

impl<B: FaultyBus> Scene<B> {
    /// A group without members. The publisher starts.
    pub async fn start(address: Address, lease: Duration) -> Self {
        let bus = B::open(&address, lease).await;
        let publisher = Publisher::start(Arc::clone(&bus), &address);
        let folder = tempfile::tempdir().expect("a folder");
        Self { address, lease, bus, publisher, folder, diaries: Vec::new(), kind: PhantomData }
    }

    /// Starts a member that delivers up to 400 records a second.
    pub fn member(&mut self) -> Process<Member> {
        self.member_with(8, Duration::from_millis(20))
    }

    /// Starts a member. It delivers so many records at once, and each delivery takes this long.
    pub fn member_with(&mut self, workers: usize, work: Duration) -> Process<Member> {
        let diary = self.folder.path().join(format!("member {}", self.diaries.len()));
        self.diaries.push(DiaryReader::new(&diary));
        Process::start(&Member { address: self.address.clone(), lease: self.lease, workers, work, diary })
    }

    /// How many records the bus has accepted so far.
    pub fn published(&self) -> usize {
        self.publisher.accepted()
    }

    /// What the members have done so far.
    pub fn history(&self) -> History {
        History::new(self.diaries.iter().map(DiaryReader::entries).collect())
    }

    /// What the server says that is done.
    pub async fn done(&self) -> Done {
        B::done(&self.address).await
    }

    /// Runs `cause`, which ends when the fault has taken effect. Waits first until all acks so far are durable.
    pub async fn fault(&self, faulty: Faulty, cause: impl Future<Output = ()>) -> Fault {
        let acked = self.history().acked();
        wait_until("acks become durable", async || {
            let done = self.done().await;
            acked.iter().all(|place| done.contains(place))
        })
        .await;
        let (done, from) = (self.done().await, now_millis());
        cause.await;
        Fault { faulty, from, until: now_millis(), done, is_pause: false }
    }

    /// Waits until another member has taken over the deliveries that a member had in flight. Returns those that it
    /// repeats. The others are done: the server got their acks.
    pub async fn taken_over(&self, in_flight: BTreeSet<Delivered>, by: &Process<Member>) -> BTreeSet<Delivered> {
        let repeats = |entries: &[Entry]| {
            let started: BTreeSet<Place> = starts(entries).map(|entry| entry.place).collect();
            in_flight.iter().copied().filter(|delivered| started.contains(&delivered.place)).collect::<BTreeSet<_>>()
        };
        wait_until("a member takes over", async || {
            let repeats = repeats(&by.entries());
            let done = if repeats.len() < in_flight.len() { self.done().await } else { Done::default() };
            in_flight.iter().all(|delivered| repeats.contains(delivered) || done.contains(&delivered.place))
        })
        .await;
        repeats(&by.entries())
    }

    /// Waits until every member delivers records that it fetched from now on, and their acks are durable.
    pub async fn until_members_go_on(&self, members: &[Process<Member>]) {
        let from = now_millis();
        for member in members {
            wait_until("a member goes on", async || {
                let acked = acked_since(from, &member.entries());
                // The server is asked only when that may be the case.
                !acked.is_empty() && {
                    let done = self.done().await;
                    acked.iter().any(|delivered| done.contains(&delivered.place))
                }
            })
            .await;
        }
    }

    /// Ends the publisher, waits until everything is done, ends the members and checks everything. Returns the number
    /// of deliveries that were repeated.
    pub async fn finish(self, members: Vec<Process<Member>>, faults: &[Fault]) -> usize {
        let Self { address, bus, publisher, diaries, folder: _folder, .. } = self;
        wait_until("enough is published", async || publisher.accepted() > 500).await;
        let published = publisher.stop().await;
        let history = || History::new(diaries.iter().map(DiaryReader::entries).collect());
        wait_until("everything that was published is done", async || {
            let history = history();
            // The server is asked only when that may be the case.
            history.is_fetched(&published) && history.is_done(&B::done(&address).await)
        })
        .await;
        stop(members).await;
        let history = history();
        let repeated = history.check(&published, faults, B::ACKS_ARE_DURABLE);
        check_rest(&history, &*bus, &address).await;
        repeated
    }
}

/// A new member of the group gets exactly the records that were not acked: those that the members held.
async fn check_rest(history: &History, bus: &dyn Bus, address: &Address) {
    let (fetched, rest) = (history.fetched(), read_rest(bus, address).await);
    for (place, number) in &rest {
        // A record that was published again may have two places. The members may have ended before they read the second.
        let is_second = !fetched.contains_key(place) && fetched.values().any(|other| other == number);
        assert!(is_held(*number) || is_second, "{number} at {place:?} was acked and is read again");
    }
    for (place, number) in fetched.iter().filter(|(_, number)| is_held(**number)) {
        assert!(rest.contains_key(place), "{number} at {place:?} was never acked, and the group passed it");
    }
}

/// Asks members to end, and waits until they have. Their connections may lead through a proxy in this program.
pub async fn stop(members: Vec<Process<Member>>) {
    let stopped = tokio::task::spawn_blocking(|| members.into_iter().for_each(Process::stop));
    stopped.await.expect("members end without an error");
}

/// The deliveries whose record was fetched after this time, and was acked.
fn acked_since(from: u64, entries: &[Entry]) -> BTreeSet<Delivered> {
    let fetched = entries.iter().filter(|entry| entry.at > from && matches!(entry.step, Step::Fetched(_)));
    let fetched: BTreeSet<Delivered> = fetched.map(Entry::delivered).collect();
    let acked = entries.iter().filter(|entry| entry.step == Step::Acked).map(Entry::delivered);
    acked.filter(|acked| fetched.contains(acked)).collect()
}

fn starts(entries: &[Entry]) -> impl Iterator<Item = &Entry> {
    entries.iter().filter(|entry| entry.step == Step::Started)
}

/// The number of deliveries that have started.
pub fn deliveries(entries: &[Entry]) -> usize {
    starts(entries).count()
}

use std::collections::{BTreeMap, BTreeSet};

use super::member::{THREADS, is_held};
use super::{Delivered, Done, Entry, Place, Step};

/// The diaries of all members, each in the order of its entries.
pub struct History {
    diaries: Vec<Vec<Entry>>,
}

/// The members that a fault concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faulty {
    /// The member with this diary.
    Member(usize),
    /// All members: the fault is one of the server.
    Server,
}

/// A fault of a member or of the server. Times are milliseconds since 1970.
#[derive(Debug)]
pub struct Fault {
    /// The members that the fault concerns.
    pub faulty: Faulty,
    /// A time before the fault began.
    pub from: u64,
    /// A time after the fault took effect, or ended.
    pub until: u64,
    /// What was done and durable before the fault began.
    pub done: Done,
    /// The member was paused, and continued.
    pub is_pause: bool,
}

impl Fault {
    /// True if the fault may have cut off the first delivery or its ack, so that another delivery followed.
    fn explains(&self, first: &Delivery, again: &Delivery, place: &Place) -> bool {
        let concerns = self.faulty == Faulty::Server || self.faulty == Faulty::Member(first.member);
        concerns && first.start <= self.until && again.start >= self.from && !self.done.contains(place)
    }

    /// True if the paused member decided to start this delivery before the pause, and started it afterwards.
    fn resumes(&self, delivery: &Delivery) -> bool {
        self.is_pause && self.faulty == Faulty::Member(delivery.member) && delivery.start >= self.until
    }
}

/// One delivery of a record.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Delivery {
    start: u64,
    member: usize,
    generation: i64,
}

impl History {
    /// The history that these diaries tell.
    pub fn new(diaries: Vec<Vec<Entry>>) -> Self {
        Self { diaries }
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.diaries.iter().flatten()
    }

    /// The entries of one member.
    pub fn of(&self, member: usize) -> &[Entry] {
        &self.diaries[member]
    }

    /// The number of each record that was fetched.
    pub fn fetched(&self) -> BTreeMap<Place, u32> {
        let fetched = self.entries().filter_map(|entry| match entry.step {
            Step::Fetched(number) => Some((entry.place, number)),
            _ => None,
        });
        fetched.collect()
    }

    /// The records with an ack that was applied.
    pub fn acked(&self) -> BTreeSet<Place> {
        self.entries().filter(|entry| entry.step == Step::Acked).map(|entry| entry.place).collect()
    }

    /// The deliveries of a member that were not acked.
    pub fn in_flight(&self, member: usize) -> BTreeSet<Delivered> {
        let mut in_flight = BTreeSet::new();
        for entry in self.of(member) {
            match entry.step {
                Step::Started => _ = in_flight.insert(entry.delivered()),
                Step::Acked | Step::LostLease => _ = in_flight.remove(&entry.delivered()),
                _ => {}
            }
        }
        in_flight
    }

    /// The times at which deliveries started.
    pub fn starts(&self) -> impl Iterator<Item = u64> {
        self.entries().filter(|entry| entry.step == Step::Started).map(|entry| entry.at)
    }

    /// The deliveries of each record, in the order in which they started.
    fn deliveries(&self) -> BTreeMap<Place, Vec<Delivery>> {
        let mut deliveries: BTreeMap<Place, Vec<Delivery>> = BTreeMap::new();
        for (member, diary) in self.diaries.iter().enumerate() {
            for entry in diary.iter().filter(|entry| entry.step == Step::Started) {
                let delivery = Delivery { start: entry.at, member, generation: entry.generation };
                deliveries.entry(entry.place).or_default().push(delivery);
            }
        }
        deliveries.values_mut().for_each(|deliveries| deliveries.sort_unstable());
        deliveries
    }

    /// True if every published record was fetched.
    pub fn is_fetched(&self, published: &BTreeSet<u32>) -> bool {
        published.is_subset(&self.fetched().into_values().collect())
    }

    /// True if all that was fetched is done, except records that members hold.
    pub fn is_done(&self, done: &Done) -> bool {
        self.fetched().iter().all(|(place, number)| is_held(*number) || done.contains(place))
    }

    /// Every published record was read and delivered, no other was read, and only deliveries that a fault cut off before
    /// their ack was durable are repeated. Returns the number of repeated deliveries.
    pub fn check(&self, published: &BTreeSet<u32>, faults: &[Fault], acks_are_durable: bool) -> usize {
        let fetched = self.fetched();
        for (place, number) in &fetched {
            assert!(published.contains(number), "{number} was read at {place:?} and not published");
        }
        let finished = |entry: &&Entry| matches!(entry.step, Step::Ended | Step::Held);
        let finished: BTreeSet<u32> = self.entries().filter(finished).map(|entry| fetched[&entry.place]).collect();
        for number in published {
            assert!(finished.contains(number), "{number} was published and never delivered");
        }
        let (mut repeated, mut resumed) = (0, 0);
        for (place, deliveries) in self.deliveries() {
            for (first, again) in deliveries.iter().zip(&deliveries[1..]) {
                let about = || self.about(place, faults);
                repeated += 1;
                if faults.iter().any(|fault| fault.explains(first, again, &place)) {
                    let is_durable = acks_are_durable && self.is_acked(first, place, again.start);
                    assert!(!is_durable, "{place:?} was acked and was delivered again: {}", about());
                } else {
                    let is_resumed = faults.iter().any(|fault| fault.resumes(again));
                    assert!(is_resumed, "{place:?} was delivered again for no reason: {}", about());
                    resumed += 1;
                }
            }
        }
        // Each thread of a member may be between the decision and the start of a delivery when it is paused.
        let pauses = faults.iter().filter(|fault| fault.is_pause).count();
        assert!(resumed <= THREADS * pauses, "{resumed} deliveries of others were started after {pauses} pauses");
        repeated
    }

    /// True if the ack of this delivery was applied before this time.
    fn is_acked(&self, delivery: &Delivery, place: Place, before: u64) -> bool {
        let is_its_ack = |entry: &Entry| {
            entry.step == Step::Acked && entry.place == place && entry.generation == delivery.generation
        };
        self.of(delivery.member).iter().any(|entry| is_its_ack(entry) && entry.at < before)
    }

    /// No ack of these deliveries of a member was applied.
    pub fn check_lost(&self, member: usize, deliveries: &BTreeSet<Delivered>) {
        for entry in self.of(member).iter().filter(|entry| entry.step == Step::Acked) {
            let is_one = deliveries.contains(&entry.delivered());
            assert!(!is_one, "an ack after the lease was applied: {}", self.about(entry.place, &[]));
        }
    }

    /// All entries about a record, with the number of the member that wrote each, and the faults.
    fn about(&self, place: Place, faults: &[Fault]) -> String {
        let of_member = |(member, diary): (usize, &Vec<Entry>)| {
            let entries = diary.iter().filter(|entry| entry.place == place);
            entries.map(|entry| format!("member {member}: {entry:?}")).collect::<Vec<_>>()
        };
        let entries: Vec<String> = self.diaries.iter().enumerate().flat_map(of_member).collect();
        let faults = faults.iter().map(|Fault { faulty, from, until, .. }| format!("{faulty:?}: {from} to {until}"));
        format!("{entries:#?}, faults: {:?}", faults.collect::<Vec<_>>())
    }
}

use std::collections::{BTreeMap, BTreeSet};

use super::member::is_held;
use super::{Done, Entry, Place, Step};

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
}

impl Fault {
    /// True if the fault may have cut off the first delivery or its ack, so that another delivery followed.
    fn explains(&self, first: &Delivery, again: &Delivery, place: &Place) -> bool {
        let concerns = self.faulty == Faulty::Server || self.faulty == Faulty::Member(first.member);
        concerns && first.start <= self.until && again.start >= self.from && !self.done.contains(place)
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

    /// The deliveries of a member that were not acked, with their generation.
    pub fn in_flight(&self, member: usize) -> BTreeSet<(Place, i64)> {
        let mut in_flight = BTreeSet::new();
        for entry in self.of(member) {
            match entry.step {
                Step::Started => _ = in_flight.insert((entry.place, entry.generation)),
                Step::Acked | Step::LostLease => _ = in_flight.remove(&(entry.place, entry.generation)),
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

    /// True if every published record was fetched, and all that were fetched are done, except those that members hold.
    pub fn is_complete(&self, published: &BTreeSet<u32>, done: &Done) -> bool {
        let fetched = self.fetched();
        let numbers: BTreeSet<u32> = fetched.values().copied().collect();
        published.is_subset(&numbers) && fetched.iter().all(|(place, number)| is_held(*number) || done.contains(place))
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
        let mut repeated = 0;
        for (place, deliveries) in self.deliveries() {
            for (first, again) in deliveries.iter().zip(&deliveries[1..]) {
                let about = || self.about(place, faults);
                assert!(
                    faults.iter().any(|fault| fault.explains(first, again, &place)),
                    "{place:?} was delivered again for no reason: {}",
                    about()
                );
                let is_durable = acks_are_durable && self.is_acked(first, place, again.start);
                assert!(!is_durable, "{place:?} was acked and was delivered again: {}", about());
                repeated += 1;
            }
        }
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
    pub fn check_lost(&self, member: usize, deliveries: &BTreeSet<(Place, i64)>) {
        for entry in self.of(member).iter().filter(|entry| entry.step == Step::Acked) {
            let is_one = deliveries.contains(&(entry.place, entry.generation));
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

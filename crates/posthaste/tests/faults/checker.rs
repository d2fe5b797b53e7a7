//! Checks the diaries of all nodes at the end of a test.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::node::Entry;

/// A delivery that ended at most this many milliseconds before a fault may be repeated, because it was not settled yet.
/// The promise is 100 ms; the rest is for a machine that is busy with other tests.
const UNSETTLED: u64 = 1_500;
/// A fault takes effect up to this many milliseconds after its time, or before it: the threads of a process do not stop
/// at the moment at which the signal is sent, and the time is read when the signal was sent.
const TAKES_EFFECT: u64 = 100;
/// A paused node continues the deliveries that its workers had already begun. This many workers may do so after a fault.
const WORKERS: usize = 4;

/// The diaries of all nodes, each in the order of its entries.
pub struct History {
    diaries: Vec<Vec<Entry>>,
    /// The times of the faults, in milliseconds since 1970.
    pub faults: Vec<u64>,
    unsettled: u64,
}

/// The counts of a checked history.
#[derive(Debug)]
pub struct Summary {
    pub committed: usize,
    pub duplicates: usize,
}

impl History {
    pub fn new(diaries: Vec<Vec<Entry>>, faults: Vec<u64>) -> Self {
        Self { diaries, faults, unsettled: UNSETTLED }
    }

    /// For a database where a node may have to wait this many milliseconds until it can settle a row.
    pub fn settled_within(mut self, millis: u64) -> Self {
        self.unsettled = millis;
        self
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.diaries.iter().flatten()
    }

    pub fn committed(&self) -> BTreeSet<&str> {
        let committed = self.entries().filter_map(|entry| match entry {
            Entry::Committed { id } => Some(id.as_str()),
            _ => None,
        });
        committed.collect()
    }

    /// True if every event whose commit succeeded was delivered to the end.
    pub fn is_complete(&self) -> bool {
        let ended: BTreeSet<&str> = self.ended().into_keys().collect();
        self.committed().is_subset(&ended)
    }

    fn ended(&self) -> HashMap<&str, Vec<u64>> {
        let mut ended: HashMap<&str, Vec<u64>> = HashMap::new();
        for entry in self.entries() {
            if let Entry::Ended { id, at } = entry {
                ended.entry(id).or_default().push(*at);
            }
        }
        ended
    }

    /// No event is lost, no event of a rolled-back transaction is delivered, and only deliveries in flight are
    /// repeated.
    pub fn check(&self) -> Summary {
        let (committed, ended) = (self.committed(), self.ended());
        for id in &committed {
            assert!(ended.contains_key(id), "committed and never delivered: {id}");
        }
        let mut starts: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for entry in self.entries() {
            match entry {
                Entry::Started { id, at, .. } => starts.entry(id).or_default().push(*at),
                Entry::RolledBack { id } => {
                    assert!(!ended.contains_key(id.as_str()), "rolled back and delivered: {id}");
                }
                _ => {}
            }
        }
        let (mut duplicates, mut resumed) = (0, 0);
        for (id, mut starts) in starts {
            starts.sort_unstable();
            duplicates += starts.len() - 1;
            for again in starts.windows(2) {
                // An end within the same millisecond belongs to the later delivery.
                let before = ended.get(id).into_iter().flatten().filter(|end| **end < again[1]).max();
                // Either the fault cut off the delivery, or the delivery ended so shortly before it that it was not
                // settled.
                let explained = match before {
                    None => self.faults.iter().any(|fault| (again[0]..=again[1]).contains(fault)),
                    Some(end) => {
                        let excused = end.saturating_sub(TAKES_EFFECT)..=end + self.unsettled;
                        self.faults.iter().any(|fault| excused.contains(fault))
                    }
                };
                let is_resumed = self.faults.iter().any(|fault| fault.abs_diff(again[1]) <= TAKES_EFFECT);
                assert!(explained || is_resumed, "{id} was delivered again for no reason: {}", self.about(id));
                resumed += usize::from(!explained);
            }
        }
        assert!(resumed <= WORKERS * self.faults.len(), "{resumed} deliveries of others were begun after a pause");
        Summary { committed: committed.len(), duplicates }
    }

    /// All entries about an event, with the number of the node that wrote each, and the faults.
    fn about(&self, event: &str) -> String {
        let of_node = |(node, diary): (usize, &Vec<Entry>)| {
            let entries = diary.iter().filter(|entry| entry.id() == Some(event));
            entries.map(|entry| format!("node {node}: {entry:?}")).collect::<Vec<_>>()
        };
        let entries: Vec<String> = self.diaries.iter().enumerate().flat_map(of_node).collect();
        format!("{entries:#?}, faults at {:?}", self.faults)
    }

    /// The first deliveries of the events of one key start in the order in which the writer wrote the events.
    pub fn check_order(&self) {
        let mut starts: Vec<(u64, u32, u32)> = Vec::new();
        for entry in self.entries() {
            if let Entry::Started { key, number, at, .. } = entry {
                starts.push((*at, *key, *number));
            }
        }
        starts.sort_unstable();
        let mut last: HashMap<u32, (u32, u64)> = HashMap::new();
        let mut seen: BTreeSet<(u32, u32)> = BTreeSet::new();
        for (at, key, number) in starts {
            if !seen.insert((key, number)) {
                continue;
            }
            if let Some((before, when)) = last.insert(key, (number, at)) {
                assert!(before < number || when == at, "key {key}: event {number} was delivered after event {before}");
            }
        }
    }
}

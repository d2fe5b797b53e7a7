//! Checks the diaries of all nodes at the end of a test.

use std::collections::{BTreeMap, BTreeSet};

use posthaste_backend_tests::processes::now_millis;

use crate::database::done;
use crate::node::Entry;

/// A worker of a paused node may have decided to start a delivery before the pause, and starts it after the pause. This
/// many workers may do so.
const WORKERS: usize = 4;

/// The diaries of all nodes, each in the order of its entries.
pub struct History {
    diaries: Vec<Vec<Entry>>,
}

/// A fault of one node. Times are in milliseconds since 1970.
pub struct Fault {
    /// The number of the node's diary.
    pub node: usize,
    /// A time before the fault began.
    pub from: u64,
    /// A time after the fault took effect, or ended.
    pub until: u64,
    /// The events that were done before the fault began.
    pub done: BTreeSet<String>,
    /// The node was paused, and continued.
    pub is_pause: bool,
}

impl Fault {
    /// Runs `cause`, which ends when the fault of the node has taken effect.
    pub async fn of(node: usize, url: &str, cause: impl Future<Output = ()>) -> Self {
        let (done, from) = (done(url).await, now_millis());
        cause.await;
        Self { node, from, until: now_millis(), done, is_pause: false }
    }

    /// True if the fault may have cut off the first delivery, or its settlement, so that another delivery followed.
    fn explains(&self, first: &Delivery, again: &Delivery) -> bool {
        first.node == self.node && first.start <= self.until && again.start >= self.from
    }

    /// True if one of the deliveries started when the paused node continued.
    fn resumes(&self, first: &Delivery, again: &Delivery) -> bool {
        let resumed = |delivery: &Delivery| delivery.node == self.node && delivery.start >= self.from;
        self.is_pause && (resumed(first) || resumed(again))
    }
}

/// One call of a listener.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Delivery {
    start: u64,
    node: usize,
}

impl History {
    pub fn new(diaries: Vec<Vec<Entry>>) -> Self {
        Self { diaries }
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

    /// The events that were delivered to the end.
    pub fn ended(&self) -> BTreeSet<&str> {
        let ended = self.entries().filter_map(|entry| match entry {
            Entry::Ended { id, .. } => Some(id.as_str()),
            _ => None,
        });
        ended.collect()
    }

    /// True if every event whose commit succeeded was delivered to the end.
    pub fn is_complete(&self) -> bool {
        self.committed().is_subset(&self.ended())
    }

    /// The deliveries of each event, in the order in which they started.
    fn deliveries(&self) -> BTreeMap<&str, Vec<Delivery>> {
        let mut deliveries: BTreeMap<&str, Vec<Delivery>> = BTreeMap::new();
        for (node, diary) in self.diaries.iter().enumerate() {
            for entry in diary {
                if let Entry::Started { id, at, .. } = entry {
                    deliveries.entry(id).or_default().push(Delivery { start: *at, node });
                }
            }
        }
        deliveries.values_mut().for_each(|deliveries| deliveries.sort_unstable());
        deliveries
    }

    /// No event is lost, no event of a rolled-back transaction is delivered, and only deliveries that a fault cut off
    /// before they were settled are repeated. Returns the number of committed events.
    pub fn check(&self, faults: &[Fault]) -> usize {
        let (committed, ended) = (self.committed(), self.ended());
        for id in &committed {
            assert!(ended.contains(id), "committed and never delivered: {id}");
        }
        for entry in self.entries() {
            if let Entry::RolledBack { id } = entry {
                assert!(!ended.contains(id.as_str()), "rolled back and delivered: {id}");
            }
        }
        let mut resumed = 0;
        for (id, deliveries) in self.deliveries() {
            for (first, again) in deliveries.iter().zip(&deliveries[1..]) {
                let was_done = |fault: &Fault| fault.done.contains(id) && again.start > fault.from;
                assert!(
                    !faults.iter().any(was_done),
                    "{id} was done and was delivered again: {}",
                    self.about(id, faults)
                );
                if !faults.iter().any(|fault| fault.explains(first, again)) {
                    let is_resumed = faults.iter().any(|fault| fault.resumes(first, again));
                    assert!(is_resumed, "{id} was delivered again for no reason: {}", self.about(id, faults));
                    resumed += 1;
                }
            }
        }
        let pauses = faults.iter().filter(|fault| fault.is_pause).count();
        assert!(resumed <= WORKERS * pauses, "{resumed} deliveries of others were begun after {pauses} pauses");
        committed.len()
    }

    /// All entries about an event, with the number of the node that wrote each, and the faults.
    fn about(&self, event: &str, faults: &[Fault]) -> String {
        let of_node = |(node, diary): (usize, &Vec<Entry>)| {
            let entries = diary.iter().filter(|entry| entry.id() == Some(event));
            entries.map(|entry| format!("node {node}: {entry:?}")).collect::<Vec<_>>()
        };
        let entries: Vec<String> = self.diaries.iter().enumerate().flat_map(of_node).collect();
        let faults = faults.iter().map(|Fault { node, from, until, .. }| format!("node {node}: {from} to {until}"));
        format!("{entries:#?}, faults: {:?}", faults.collect::<Vec<_>>())
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
        let mut last: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
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

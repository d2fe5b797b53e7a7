use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::{Admission, Ingested, Refusal};
use crate::{Event, lock};

/// A cache of the owners of topics. An owner never changes, so the cache cannot be stale.
pub struct TopicOwners {
    limit: usize,
    by_key: Mutex<HashMap<String, String>>,
}

/// The owners of the topics of one batch. The store completes it inside its transaction: first with the recorded
/// owners, then with each type that it records itself.
#[derive(Clone, Default)]
pub struct BatchOwners {
    by_key: HashMap<String, String>,
    unknown: Vec<String>,
    /// The number of all recorded channels. Read only if the cache did not know every owner of the batch.
    count: usize,
    limit: usize,
}

/// The key of the event type's topic: equal for event types that differ only in `.` and `_`.
pub fn topic_key(event_type: &str) -> String {
    event_type.replace('.', "_")
}

impl TopicOwners {
    /// An empty cache. At most `limit` channels may be recorded.
    pub fn new(limit: usize) -> Self {
        Self { limit, by_key: Mutex::default() }
    }

    /// The owners of the topics of these event types that are in the cache.
    pub fn of_batch<'a>(&self, event_types: impl Iterator<Item = &'a str>) -> BatchOwners {
        let known = lock(&self.by_key);
        let mut owners = BatchOwners { limit: self.limit, ..BatchOwners::default() };
        for key in event_types.map(topic_key).collect::<HashSet<_>>() {
            match known.get(&key) {
                Some(owner) => _ = owners.by_key.insert(key, owner.clone()),
                None => owners.unknown.push(key),
            }
        }
        owners
    }

    /// Adds types that are recorded as owners of their topics.
    pub fn remember_types<'a>(&self, event_types: impl Iterator<Item = &'a str>) {
        lock(&self.by_key).extend(event_types.map(|event_type| (topic_key(event_type), event_type.to_owned())));
    }

    /// Adds the owners of a batch whose transaction has committed.
    pub fn remember(&self, batch: BatchOwners) {
        lock(&self.by_key).extend(batch.by_key);
    }
}

impl BatchOwners {
    /// The keys of topics whose owners must be read from the database.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }

    /// Adds recorded owners, by topic key, and the number of all recorded channels.
    pub fn add_recorded(&mut self, owners: impl IntoIterator<Item = (String, String)>, count: usize) {
        self.by_key.extend(owners);
        self.count = count;
    }

    /// True if every topic of the batch has an owner.
    pub fn are_complete(&self) -> bool {
        self.unknown.iter().all(|key| self.by_key.contains_key(key))
    }

    /// The topic key of a type that must be recorded now; `None` if its topic has an owner already.
    pub fn unrecorded_key(&self, event_type: &str) -> Option<String> {
        Some(topic_key(event_type)).filter(|key| !self.by_key.contains_key(key))
    }

    /// Adds a type that was recorded as the owner of this topic key.
    pub fn recorded(&mut self, key: String, event_type: &str) {
        self.by_key.insert(key, event_type.to_owned());
        self.count += 1;
    }

    /// Refuses the type unless it has a channel or may get one.
    pub fn check(&self, event_type: &str) -> Result<(), Refusal> {
        self.check_beside(event_type, &HashMap::new())
    }

    /// Like [`check`](Self::check), assuming that the types in `requested` own the topics of their keys.
    fn check_beside(&self, event_type: &str, requested: &HashMap<String, String>) -> Result<(), Refusal> {
        let key = topic_key(event_type);
        match self.by_key.get(&key).or_else(|| requested.get(&key)) {
            Some(owner) if owner == event_type => Ok(()),
            Some(owner) => Err(Refusal::TopicTaken { owner: owner.clone() }),
            None if self.count + requested.len() >= self.limit => Err(Refusal::Full { limit: self.limit }),
            None => Ok(()),
        }
    }

    /// The refusals of events that are stored independently of each other.
    pub fn refusals(&self, events: &[Arc<Event>]) -> Vec<Option<Refusal>> {
        events.iter().map(|event| self.check(event.event_type()).err()).collect()
    }

    /// The refusals of events that are stored together or not at all.
    pub fn refusals_of_atomic(&self, events: &[Arc<Event>]) -> Vec<Option<Refusal>> {
        let mut requested = HashMap::new();
        let mut refusals = Vec::with_capacity(events.len());
        for event in events {
            let checked = self.check_beside(event.event_type(), &requested);
            if checked.is_ok()
                && let Some(key) = self.unrecorded_key(event.event_type())
            {
                requested.entry(key).or_insert_with(|| event.event_type().to_owned());
            }
            refusals.push(checked.err());
        }
        refusals
    }

    /// The number of leading events that can be checked together, because no check depends on the storing of an earlier
    /// event. At least one.
    ///
    /// Two new types of one batch may need the same topic. The batch is cut before the second type: the first type owns
    /// the topic only if one of its events is stored.
    pub fn independent(&self, events: &[Arc<Event>]) -> usize {
        if self.unknown.is_empty() {
            return events.len();
        }
        let mut requested = HashMap::new();
        for (index, event) in events.iter().enumerate() {
            let event_type = event.event_type();
            let alone = self.check(event_type);
            if self.check_beside(event_type, &requested) != alone {
                return index;
            }
            if alone.is_ok()
                && let Some(key) = self.unrecorded_key(event_type)
            {
                requested.entry(key).or_insert_with(|| event_type.to_owned());
            }
        }
        events.len()
    }
}

impl Admission {
    /// The results of a batch: the refusals, and for each event that was not refused the next of `ingested`.
    pub fn merge(refusals: Vec<Option<Refusal>>, ingested: impl IntoIterator<Item = Ingested>) -> Vec<Self> {
        let mut ingested = ingested.into_iter();
        let answer = |refusal| match refusal {
            Some(refusal) => Self::Refused(refusal),
            None => Self::Ingested(ingested.next().unwrap_or(Ingested::Withheld)),
        };
        refusals.into_iter().map(answer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(types: &[&str]) -> Vec<Arc<Event>> {
        types.iter().map(|name| Arc::new(Event::builder(*name).text("{}".to_owned()).build().unwrap())).collect()
    }

    fn batch(limit: usize, events: &[Arc<Event>]) -> BatchOwners {
        TopicOwners::new(limit).of_batch(events.iter().map(|event| event.event_type()))
    }

    #[test]
    fn a_batch_is_cut_where_a_check_depends_on_an_earlier_event() {
        let same_topic = events(&["a.b", "c", "a.b", "a_b"]);
        assert_eq!(batch(10, &same_topic).independent(&same_topic), 3);
        let too_many = events(&["a", "a", "b"]);
        assert_eq!(batch(1, &too_many).independent(&too_many), 2);
    }

    #[test]
    fn an_atomic_batch_counts_its_own_types() {
        let events = events(&["a.b", "a_b", "c", "d"]);
        let refusals = batch(2, &events).refusals_of_atomic(&events);
        let taken = Refusal::TopicTaken { owner: "a.b".to_owned() };
        assert_eq!(refusals, [None, Some(taken), None, Some(Refusal::Full { limit: 2 })]);
    }

    #[test]
    fn a_recorded_owner_is_known_to_the_next_batch() {
        let (owners, events) = (TopicOwners::new(1), events(&["a_b"]));
        owners.remember_types(["a.b"].into_iter());
        let batch = owners.of_batch(["a_b"].into_iter());
        assert!(batch.unknown().is_empty());
        assert_eq!(batch.refusals(&events), [Some(Refusal::TopicTaken { owner: "a.b".to_owned() })]);
    }
}

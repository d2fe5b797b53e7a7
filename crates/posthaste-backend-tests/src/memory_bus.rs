use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::{Advance, Bus, Consumer, Poison, Position, PublishError, Quarantine, Record, Topics};
use posthaste_core::log::{
    AppendNotifier, Leased, Leases, Log, LogOptions, LogStore, Look, Member, NewRecord, Newest, StoredRecord, share,
};
use posthaste_core::{FaultKind, Progress, StoreError, lock};
use tokio::time::Instant;

/// The built-in bus in memory. Clones share one log.
#[derive(Clone)]
pub struct MemoryBus {
    log: Log<MemoryLog>,
    tables: Arc<Mutex<Tables>>,
}

/// The tables of the built-in bus in memory.
struct MemoryLog(Arc<Mutex<Tables>>);

#[derive(Default)]
struct Tables {
    /// The id of a partition is its index.
    partitions: Vec<Partition>,
    groups: HashMap<(String, i64), Group>,
    members: BTreeMap<(String, String), Instant>,
    appended: i64,
    quarantined: Vec<(String, Poison)>,
    /// How many answers to acks get lost, although the acks are recorded.
    lost_answers: usize,
    /// The quarantine is out of reach.
    is_quarantine_away: bool,
}

struct Partition {
    topic: String,
    number: u32,
    records: Vec<NewRecord>,
    /// The offset of the first record that was not removed.
    first_offset: i64,
}

/// One group's state in one partition.
#[derive(Default)]
struct Group {
    progress: Progress,
    owner: Option<String>,
    generation: i64,
    leased_until: Option<Instant>,
}

impl MemoryBus {
    /// A bus whose topics have this many partitions and whose leases last this long.
    pub fn new(partitions: u32, lease: Duration) -> Self {
        let tables: Arc<Mutex<Tables>> = Arc::default();
        Self::on(tables, LogOptions { partitions, lease, ..LogOptions::default() })
    }

    fn on(tables: Arc<Mutex<Tables>>, options: LogOptions) -> Self {
        Self { log: Log::new(MemoryLog(tables.clone()), options), tables }
    }

    /// Another bus on the same tables, as in another process.
    pub fn another(&self, options: LogOptions) -> Self {
        Self::on(self.tables.clone(), options)
    }

    /// Everything published to this topic, partition by partition.
    pub fn records(&self, topic: &str) -> Vec<Record> {
        let tables = lock(&self.tables);
        let of_topic = tables.partitions.iter().filter(|partition| partition.topic == topic);
        let records = of_topic.flat_map(|partition| partition.records.iter().cloned());
        let record =
            |NewRecord { key, value, headers, .. }| Record { topic: topic.into(), route: 0, key, value, headers };
        records.map(record).collect()
    }

    /// The quarantined records, each with the group that quarantined it.
    pub fn quarantined(&self) -> Vec<(String, Poison)> {
        lock(&self.tables).quarantined.clone()
    }

    /// The next ack is recorded, and its answer is lost.
    pub fn lose_next_answer(&self) {
        lock(&self.tables).lost_answers += 1;
    }

    /// From now on the quarantine is out of reach, or is not.
    pub fn set_quarantine_away(&self, is_away: bool) {
        lock(&self.tables).is_quarantine_away = is_away;
    }

    /// Moves a group to the earliest record in all partitions of a topic.
    pub fn reset(&self, group: &str, topic: &str) {
        let mut tables = lock(&self.tables);
        let Tables { partitions, groups, .. } = &mut *tables;
        for ((of, id), state) in groups {
            let partition = &partitions[*id as usize];
            if of == group && partition.topic == topic {
                let generation = state.generation + 1;
                *state = Group { progress: Progress::at(partition.first_offset), generation, ..Group::default() };
            }
        }
    }

    /// Removes the records of a topic below this offset, as a retention would that ignores the groups.
    pub fn remove_below(&self, topic: &str, offset: i64) {
        let mut tables = lock(&self.tables);
        let of_topic = tables.partitions.iter_mut().filter(|partition| partition.topic == topic);
        of_topic.for_each(|partition| partition.first_offset = offset.min(partition.records.len() as i64));
    }
}

#[async_trait]
impl Bus for MemoryBus {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        self.log.publish(records).await
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        self.log.subscribe(group, topics).await
    }
}

#[async_trait]
impl Quarantine for MemoryBus {
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError> {
        let place = |position: &Position| (Arc::clone(&position.topic), position.partition, position.offset);
        let mut tables = lock(&self.tables);
        if tables.is_quarantine_away {
            return Err(away("quarantine records"));
        }
        for poison in poison {
            let request = place(&poison.record.position);
            let known = |(by, kept): &(String, Poison)| by == group && place(&kept.record.position) == request;
            if !tables.quarantined.iter().any(known) {
                tables.quarantined.push((group.to_owned(), poison.clone()));
            }
        }
        Ok(())
    }
}

fn away(doing: &str) -> StoreError {
    StoreError::new(doing, FaultKind::Transient, std::io::Error::other("away"))
}

impl Tables {
    /// The ids of the partitions that this member reads.
    fn read_by(&self, member: &Member) -> Vec<i64> {
        let read = |(_, partition): &(usize, &Partition)| member.reads(&partition.topic);
        self.partitions.iter().enumerate().filter(read).map(|(id, _)| id as i64).collect()
    }

    fn members_of(&self, group: &str) -> Vec<&str> {
        let now = Instant::now();
        let is_live = |((of, _), until): &(&(String, String), &Instant)| of == group && **until > now;
        self.members.iter().filter(is_live).map(|((_, owner), _)| owner.as_str()).collect()
    }

    fn is_free(&self, group: &str, id: i64) -> bool {
        let is_leased = |group: &Group| group.leased_until.is_some_and(|until| until > Instant::now());
        !self.groups.get(&(group.to_owned(), id)).is_some_and(is_leased)
    }

    fn is_owned(&self, member: &Member, id: i64) -> bool {
        let group = self.groups.get(&(member.group.clone(), id));
        group.is_some_and(|group| group.owner.as_deref() == Some(&member.owner))
    }

    fn leased(&self, member: &Member, id: i64) -> Option<Leased> {
        let (partition, group) = (&self.partitions[id as usize], self.groups.get(&(member.group.clone(), id))?);
        Some(Leased {
            partition_id: id,
            topic: partition.topic.clone(),
            partition: partition.number,
            generation: group.generation,
            progress: group.progress.clone(),
            first_offset: partition.first_offset,
            next_offset: partition.records.len() as i64,
        })
    }
}

#[async_trait]
impl LogStore for MemoryLog {
    fn check(&self, _: &Record) -> Result<(), PublishError> {
        Ok(())
    }

    fn notifier(&self) -> Option<&dyn AppendNotifier> {
        None
    }

    async fn create_topics(&self, names: Vec<String>, partitions: u32) -> Result<Vec<(String, Vec<i64>)>, StoreError> {
        let mut tables = lock(&self.0);
        let mut created = Vec::new();
        for topic in names {
            if !tables.partitions.iter().any(|partition| partition.topic == topic) {
                let partition =
                    |number| Partition { topic: topic.clone(), number, records: Vec::new(), first_offset: 0 };
                tables.partitions.extend((0..partitions).map(partition));
            }
            let ids = tables.partitions.iter().enumerate().filter(|(_, partition)| partition.topic == topic);
            created.push((topic.clone(), ids.map(|(id, _)| id as i64).collect()));
        }
        Ok(created)
    }

    async fn append(&self, records: Vec<NewRecord>) -> Result<(), StoreError> {
        let mut tables = lock(&self.0);
        tables.appended += 1;
        for record in records {
            tables.partitions[record.partition_id as usize].records.push(record);
        }
        Ok(())
    }

    async fn newest(&self) -> Result<Newest, StoreError> {
        let tables = lock(&self.0);
        Ok(Newest { record: Some(tables.appended), partition: Some(tables.partitions.len() as i64) })
    }

    async fn read(&self, places: &[(i64, i64)], limit: usize) -> Result<(Vec<StoredRecord>, bool), StoreError> {
        let tables = lock(&self.0);
        let from = |&(id, from): &(i64, i64)| {
            let partition = &tables.partitions[id as usize];
            let from = from.max(partition.first_offset);
            let record = move |(index, record): (usize, &NewRecord)| StoredRecord {
                partition_id: id,
                offset: from + index as i64,
                key: record.key.clone(),
                value: record.value.clone(),
                headers: record.headers.clone(),
                damage: None,
            };
            partition.records.iter().skip(from as usize).enumerate().map(record)
        };
        let read: Vec<_> = places.iter().flat_map(from).take(limit).collect();
        let full = read.len() == limit;
        Ok((read, full))
    }

    async fn look(&self, member: &Member, _: Duration) -> Result<Look, StoreError> {
        let tables = lock(&self.0);
        let partitions = tables.read_by(member);
        let is_free = |id: &i64| !tables.is_owned(member, *id) && tables.is_free(&member.group, *id);
        let (has_free, members) = (partitions.iter().any(is_free), tables.members_of(&member.group).len());
        Ok(Look { has_free, members, partitions: partitions.len() })
    }

    async fn lease(&self, member: &Member, lease: Duration) -> Result<Leases, StoreError> {
        let mut tables = lock(&self.0);
        let until = Instant::now() + lease;
        tables.members.insert((member.group.clone(), member.owner.clone()), until);
        let partitions = tables.read_by(member);
        let members = tables.members_of(&member.group);
        let rank = members.iter().filter(|owner| **owner < member.owner.as_str()).count();
        let (members, share) = (members.len(), share(partitions.len(), members.len(), rank));
        let (mut owned, others): (Vec<i64>, Vec<i64>) = partitions.iter().partition(|id| tables.is_owned(member, **id));
        let free = others.into_iter().filter(|id| tables.is_free(&member.group, *id));
        let acquired: Vec<i64> = free.take(share.saturating_sub(owned.len())).collect();
        for &id in &acquired {
            let first = Progress::at(tables.partitions[id as usize].first_offset);
            let new = || Group { progress: first, ..Group::default() };
            let group = tables.groups.entry((member.group.clone(), id)).or_insert_with(new);
            group.owner = Some(member.owner.clone());
            group.generation += 1;
        }
        owned.extend(acquired);
        owned.sort_unstable();
        for &id in &owned {
            if let Some(group) = tables.groups.get_mut(&(member.group.clone(), id)) {
                group.leased_until = Some(until);
            }
        }
        let leased = owned.iter().filter_map(|&id| tables.leased(member, id)).collect();
        Ok(Leases { leased, members, partitions: partitions.len(), share })
    }

    async fn record(&self, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError> {
        let mut tables = lock(&self.0);
        let mut recorded = Vec::new();
        for Advance { partition_id, generation, progress } in advances {
            let group = tables.groups.get_mut(&(member.group.clone(), *partition_id));
            let is_owned = |group: &&mut Group| {
                let is_behind = progress.watermark() < group.progress.watermark();
                group.owner.as_deref() == Some(&member.owner) && group.generation == *generation && !is_behind
            };
            if let Some(group) = group.filter(is_owned) {
                group.progress = progress.clone();
                recorded.push(*partition_id);
            }
        }
        match tables.lost_answers.checked_sub(1) {
            Some(left) => {
                tables.lost_answers = left;
                Err(away("record acks"))
            }
            None => Ok(recorded),
        }
    }

    async fn release(&self, member: &Member, partitions: &[i64]) -> Result<(), StoreError> {
        let mut tables = lock(&self.0);
        for ((group, id), state) in &mut tables.groups {
            if *group == member.group && partitions.contains(id) && state.owner.as_deref() == Some(&member.owner) {
                (state.owner, state.leased_until) = (None, None);
            }
        }
        Ok(())
    }

    async fn leave(&self, member: &Member) -> Result<(), StoreError> {
        let all = lock(&self.0).read_by(member);
        self.release(member, &all).await?;
        lock(&self.0).members.remove(&(member.group.clone(), member.owner.clone()));
        Ok(())
    }
}

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::AppendNotifier;
use crate::bus::{Advance, PublishError, Record, Topics};
use crate::{Progress, StoreError};

/// The statements of the built-in bus on one database. [`Log`](super::Log) has the rules.
///
/// A store is correct when the laws of [`Bus`](crate::bus::Bus) hold for the log on it.
#[async_trait]
pub trait LogStore: Send + Sync + 'static {
    /// Refuses a record that this database cannot store. The other records of a publish are not affected.
    fn check(&self, record: &Record) -> Result<(), PublishError>;

    /// How processes notify each other of appends; `None` if they cannot. Then consumers poll.
    fn notifier(&self) -> Option<&dyn AppendNotifier>;

    /// Creates the topics that do not exist, with this many partitions. Returns each topic with the ids of its
    /// partitions, in their order.
    async fn create_topics(&self, names: Vec<String>, partitions: u32) -> Result<Vec<(String, Vec<i64>)>, StoreError>;

    /// Appends all records or none. The records are sorted by partition. Records of one partition keep their order and
    /// get offsets without gaps, which MUST become visible in their order.
    async fn append(&self, records: Vec<NewRecord>) -> Result<(), StoreError>;

    /// The end of the log. It costs little, so it may be called often.
    async fn newest(&self) -> Result<Newest, StoreError>;

    /// Reads records of these partitions, each from an offset on, in the order of the list. Returns true if there may
    /// be more. A record that cannot be read at all is reported and left out.
    async fn read(&self, places: &[(i64, i64)], limit: usize) -> Result<(Vec<StoredRecord>, bool), StoreError>;

    /// Looks for free partitions and for other members. It writes nothing, so it may be called often.
    async fn look(&self, member: &Member, lease: Duration) -> Result<Look, StoreError>;

    /// Renews the membership and all leases of this member, and leases free partitions up to its share. A group starts
    /// at the earliest record of a partition that is new to it. Progress that cannot be read is reported.
    async fn lease(&self, member: &Member, lease: Duration) -> Result<Leases, StoreError>;

    /// Records progress in the partitions that this member still has, and returns those. Fenced by owner and
    /// generation.
    async fn record(&self, member: &Member, advances: &[Advance]) -> Result<Vec<i64>, StoreError>;

    /// Ends the leases of this member on these partitions, so that others of its group can lease them at once.
    async fn release(&self, member: &Member, partitions: &[i64]) -> Result<(), StoreError>;

    /// Ends the membership and all its leases.
    async fn leave(&self, member: &Member) -> Result<(), StoreError>;
}

/// A consumer of a group.
#[derive(Clone, Debug)]
pub struct Member {
    /// The group.
    pub group: String,
    /// Identifies the consumer. It is new at each start.
    pub owner: String,
    /// The topics that it reads.
    pub topics: Topics,
}

impl Member {
    /// True if this member reads the topic.
    pub fn reads(&self, topic: &str) -> bool {
        self.topics.contains(topic)
    }
}

/// A record to append.
#[derive(Clone, Debug)]
pub struct NewRecord {
    /// The id of its partition.
    pub partition_id: i64,
    /// The key.
    pub key: String,
    /// The body.
    pub value: Bytes,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
}

/// A record that was read.
#[derive(Clone, Debug)]
pub struct StoredRecord {
    /// The id of its partition.
    pub partition_id: i64,
    /// Its offset.
    pub offset: i64,
    /// The key.
    pub key: String,
    /// The body.
    pub value: Bytes,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
    /// Why it cannot be read in full.
    pub damage: Option<String>,
}

/// The end of the log: equal to an earlier value if nothing was appended and no topic was created since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Rises with every append.
    pub record: Option<i64>,
    /// Rises with every new partition.
    pub partition: Option<i64>,
}

/// What a member sees of its group without writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// True if there is a partition that no member has leased.
    pub has_free: bool,
    /// How many members the group has.
    pub members: usize,
    /// How many partitions the topics have.
    pub partitions: usize,
}

/// The leases of one member.
#[derive(Debug)]
pub struct Leases {
    /// All partitions that it has leased.
    pub leased: Vec<Leased>,
    /// How many members the group has.
    pub members: usize,
    /// How many partitions the topics have.
    pub partitions: usize,
    /// How many of them it should have, see [`share`].
    pub share: usize,
}

/// A partition that a member has leased.
#[derive(Debug)]
pub struct Leased {
    /// The id of the partition.
    pub partition_id: i64,
    /// Its topic.
    pub topic: String,
    /// Its number in the topic.
    pub partition: u32,
    /// The generation of the lease.
    pub generation: i64,
    /// What the group has done.
    pub progress: Progress,
    /// The lowest offset that exists, or the next one if there are no records.
    pub first_offset: i64,
    /// The offset of the next record.
    pub next_offset: i64,
}

impl Leased {
    /// True if the position of the group does not exist: records that it has not done were removed, or the partition was
    /// created again and is shorter than it was.
    pub fn is_position_lost(&self) -> bool {
        !(self.first_offset..=self.next_offset).contains(&self.progress.watermark())
    }
}

/// The share of one of so many members: all partitions are distributed, and shares differ by at most one.
pub fn share(partitions: usize, members: usize, rank: usize) -> usize {
    let members = members.max(1);
    partitions / members + usize::from(rank < partitions % members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_distribute_all_partitions_and_differ_by_at_most_one() {
        for (partitions, members) in [(0, 1), (1, 3), (6, 4), (7, 7), (12, 5), (1_000, 3)] {
            let shares: Vec<usize> = (0..members).map(|rank| share(partitions, members, rank)).collect();
            assert_eq!(shares.iter().sum::<usize>(), partitions);
            assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1, "{shares:?}");
        }
    }
}

//! The seam to the event bus: a log of topics and partitions that groups of consumers read at their own pace.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{Settled, StoreError, Wakeup};

mod assignment;

pub use assignment::{Advance, AssignedPartition, Assignment};

/// What is appended to a topic.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Where it goes.
    pub topic: Arc<str>,
    /// Records with the same route share a partition, and so their order. See [`route`].
    pub route: u64,
    /// What identifies it.
    pub key: String,
    /// Its body.
    pub value: Bytes,
    /// What goes with it.
    pub headers: Vec<(String, String)>,
}

/// The route of records that belong together: a stable hash of what identifies their common owner.
///
/// FNV-1a, because the choice of a partition outlives the process and the release that made it.
pub fn route(parts: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        // The separator keeps ("a", "bc") and ("ab", "c") apart.
        for byte in part.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

/// A place in a log, with the generation of the partition lease under which it was read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// Of which topic.
    pub topic: Arc<str>,
    /// In which partition.
    pub partition: u32,
    /// Its place there.
    pub offset: i64,
    /// Of the lease under which it was fetched.
    pub generation: i64,
}

/// A record as a consumer sees it.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Where it stands.
    pub position: Position,
    /// What identifies it.
    pub key: String,
    /// Its body.
    pub value: Bytes,
    /// What goes with it.
    pub headers: Vec<(String, String)>,
    /// What the bus itself could not read of it; such a record is quarantined and not decoded.
    pub damage: Option<String>,
}

/// Which topics a group reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topics {
    /// These.
    Named(Vec<String>),
    /// Every topic whose name starts with this, also those made later.
    Prefix(String),
}

/// A log of topics.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-testing`.
///
/// - `a_published_record_is_read_by_every_group`, from the earliest record at a group's first start.
/// - `publish_acks_each_record_once_durable`: answers are in the order of the records.
/// - `offsets_become_visible_in_order`: who has seen offset n never later finds a new one ≤ n.
/// - `records_of_one_route_share_a_partition_in_order`.
/// - `a_partition_has_one_reader_per_group`, and a second reader takes over when the first closes or its lease ends.
/// - `an_unacked_record_is_read_again_by_the_next_reader`, `an_acked_record_is_not`, also when acked out of order.
/// - `an_ack_of_a_stale_generation_is_lost_lease`.
/// - `a_topic_made_later_is_read_by_its_prefix`.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Appends; one durable answer per record, in order. Topics are made on the way.
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), Arc<StoreError>>>;

    /// Joins a group. What it reads starts where the group's acks end, or at the earliest record.
    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError>;
}

/// One member of a group.
#[async_trait]
pub trait Consumer: Send + Sync + 'static {
    /// The next records, each handed out once to this consumer per generation; empty when there are none now.
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError>;

    /// Marks records as done, in any order; durable when it returns. Answers in the same order.
    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError>;

    /// Starts the leases of all partitions anew. A position is renewed when its generation still holds.
    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError>;

    /// Leaves the group; its partitions are free at once.
    async fn close(&self) -> Result<(), StoreError>;

    /// How long a partition is held without being renewed.
    fn lease(&self) -> Duration;

    /// Signalled when there may be something to fetch.
    fn wakeup(&self) -> &Wakeup;
}

/// A record that cannot be read, and why.
#[derive(Clone, Debug)]
pub struct Poison {
    /// What was set aside.
    pub record: Fetched,
    /// Why it cannot be read.
    pub reason: String,
}

/// Where unreadable records are kept for an operator, before they are acked.
#[async_trait]
pub trait Quarantine: Send + Sync + 'static {
    /// Keeps the records; the same record again is harmless. Durable when it returns.
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError>;
}

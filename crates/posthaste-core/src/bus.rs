//! The seam to the event bus: a log of topics and partitions that groups of consumers read at their own pace.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::{Failure, Settled, StoreError, Wakeup};

mod assignment;

pub use assignment::{Advance, AssignedPartition, Assignment};

/// The size of the largest record that a bus must accept: a payload of the maximum size, with its envelope.
pub const MAX_RECORD: usize = 2 * 1024 * 1024;

/// The code of the failure of an item that the bus did not accept.
pub const BUS_FAILURE: &str = "bus";

/// A record to append to a topic.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The topic to append to.
    pub topic: Arc<str>,
    /// Records with the same route share a partition, and so their order: the partition is the route modulo the number of
    /// partitions. See [`route`].
    pub route: u64,
    /// The key of the record.
    pub key: String,
    /// The body.
    pub value: Bytes,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
}

impl Record {
    /// The size of key, value and headers.
    pub fn size(&self) -> usize {
        size(&self.key, &self.value, &self.headers)
    }

    /// Refuses a record that is larger than [`MAX_RECORD`].
    pub fn check_size(&self) -> Result<(), PublishError> {
        match self.size() {
            ..=MAX_RECORD => Ok(()),
            size => Err(PublishError::Refused { reason: format!("it has {size} bytes, more than {MAX_RECORD}") }),
        }
    }
}

/// The route of records that belong together: a stable hash of the fields that identify their common owner.
///
/// FNV-1a, because the choice of a partition outlives the process and the release that made it.
pub fn route(parts: &[&str]) -> u64 {
    hash(parts.iter().map(|part| part.as_bytes()))
}

fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for part in parts {
        // The separator keeps ("a", "bc") and ("ab", "c") apart.
        for byte in part.iter().chain(&[0xff]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    hash
}

/// The position of a record in the log, with the generation of the partition lease under which it was read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Position {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition of the topic.
    pub partition: u32,
    /// The offset in the partition.
    pub offset: i64,
    /// The generation of the partition lease under which the record was fetched.
    pub generation: i64,
}

/// A record as a consumer sees it.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The position of the record.
    pub position: Position,
    /// The key of the record.
    pub key: String,
    /// The body.
    pub value: Bytes,
    /// Names and values, in order.
    pub headers: Vec<(String, String)>,
    /// Why the bus itself could not read the record. Such a record is quarantined and not decoded.
    pub damage: Option<String>,
}

impl Fetched {
    /// The size of key, value and headers.
    pub fn size(&self) -> usize {
        size(&self.key, &self.value, &self.headers)
    }

    /// A hash of key and value. It tells two records apart that had the same position: a topic that is deleted and
    /// created again begins with offset 0.
    pub fn fingerprint(&self) -> u64 {
        hash([self.key.as_bytes(), &self.value])
    }
}

fn size(key: &str, value: &[u8], headers: &[(String, String)]) -> usize {
    let headers = headers.iter().map(|(name, value)| name.len() + value.len());
    key.len() + value.len() + headers.sum::<usize>()
}

/// Why a record is not published.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PublishError {
    /// The bus refuses this record for good, for example because it is too large. The other records of the call are not
    /// affected.
    #[error("the bus refuses the record: {reason}")]
    Refused {
        /// What is wrong with the record.
        reason: String,
    },
    /// The bus did not accept the record, and may accept it later. The record may be stored nevertheless.
    #[error("the bus did not accept the record: {}", .0.chain())]
    Unavailable(Arc<StoreError>),
}

impl PublishError {
    /// The failure of the item that the record was made of. Only a refused record is the fault of its item.
    pub fn failure(&self) -> Failure {
        match self {
            Self::Refused { .. } => Failure::permanent("bus_refused", self.to_string()),
            Self::Unavailable(error) => {
                Failure::outage(BUS_FAILURE, "the bus did not accept the record").cause(error.chain())
            }
        }
    }
}

/// The topics that a group reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topics {
    /// The topics with these names.
    Named(Vec<String>),
    /// Every topic whose name starts with this, including topics that are created later.
    Prefix(String),
    /// Both: every topic whose name starts with the text, and the topics with the names.
    PrefixAndNamed(String, Vec<String>),
}

impl Topics {
    /// True if this is one of them.
    pub fn contains(&self, topic: &str) -> bool {
        let is_named = |names: &[String]| names.iter().any(|name| name == topic);
        match self {
            Self::Named(names) => is_named(names),
            Self::Prefix(prefix) => topic.starts_with(prefix.as_str()),
            Self::PrefixAndNamed(prefix, names) => topic.starts_with(prefix.as_str()) || is_named(names),
        }
    }

    /// The topics that are named.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Named(names) | Self::PrefixAndNamed(_, names) => names,
            Self::Prefix(_) => &[],
        }
    }

    /// The beginning of the names of topics.
    pub fn prefix(&self) -> Option<&str> {
        match self {
            Self::Named(_) => None,
            Self::Prefix(prefix) | Self::PrefixAndNamed(prefix, _) => Some(prefix),
        }
    }
}

/// A log of topics.
///
/// # Laws
///
/// Each law is a test of that name in `posthaste-backend-tests`.
///
/// - `a_published_record_is_read_by_every_group`, from the earliest record at a group's first start.
/// - `publish_acks_each_record_once_durable`: results are in the order of the records.
/// - `a_refused_record_does_not_affect_the_others`: a record that is too large is refused alone.
/// - `offsets_become_visible_in_order`: a reader that has seen offset n never later finds a new one ≤ n.
/// - `records_of_one_route_share_a_partition_in_order`.
/// - `a_route_names_a_partition_modulo_their_number`.
/// - `a_partition_has_one_reader_per_group`, and another reader takes over when the first closes or its lease ends.
/// - `partitions_are_balanced_over_the_readers_of_a_group`, also when readers come and go.
/// - `a_revoked_partition_is_given_up_when_its_records_are_acked_or_released`: none of them is read twice.
/// - `a_paused_partition_that_is_revoked_is_read_further_by_its_next_reader`.
/// - `a_position_that_does_not_exist_is_not_skipped`: the partition is not read until its position is reset.
/// - `an_ack_is_durable_after_a_flush_and_after_a_close`.
/// - `an_unacked_record_is_read_again_by_the_next_reader`, `an_acked_record_is_not`, also when acked out of order.
/// - `an_ack_of_a_stale_generation_is_lost_lease`.
/// - `a_topic_made_later_is_read_by_its_prefix`.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Appends the records, and creates topics that do not exist. Returns one result per record, in order: `Ok` if the
    /// record is durable.
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>>;

    /// Joins a group. The consumer starts to read where the group's acks end, or at the earliest record.
    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError>;
}

/// One member of a group.
#[async_trait]
pub trait Consumer: Send + Sync + 'static {
    /// Returns the next records, each once to this consumer per generation; empty if there are none now.
    async fn fetch(&self, limit: usize) -> Result<Vec<Fetched>, StoreError>;

    /// Accepts records as done, in any order. The acks are durable within 100 ms, and after `flush` and `close`. Returns
    /// the results in the same order. Fails if earlier acks do not become durable.
    async fn ack(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError>;

    /// Makes all accepted acks durable.
    async fn flush(&self) -> Result<(), StoreError>;

    /// Gives up records that this consumer will not deliver, because their partition is revoked.
    fn release(&self, positions: &[&Position]);

    /// True if the delivery of this record may start: its partition is assigned to this consumer and not revoked.
    fn may_start(&self, position: &Position) -> bool;

    /// Renews the leases of all partitions. A position is renewed if its generation is still current.
    async fn renew(&self, positions: &[&Position]) -> Result<Vec<Settled>, StoreError>;

    /// Leaves the group. Its partitions are free at once.
    async fn close(&self) -> Result<(), StoreError>;

    /// How long a partition stays leased without a renewal.
    fn lease(&self) -> Duration;

    /// Signalled when there may be something to fetch.
    fn wakeup(&self) -> &Wakeup;

    /// Signalled when partitions were revoked or lost: the answers of [`may_start`](Self::may_start) have changed.
    ///
    /// Another consumer gets a revoked partition. Until then its records in flight may be acked, for a limited time;
    /// records that were not started must be released. When none is left in flight, the partition is given up.
    fn revocations(&self) -> &Wakeup;
}

/// A record that cannot be read, and the reason.
#[derive(Clone, Debug)]
pub struct Poison {
    /// The unreadable record.
    pub record: Fetched,
    /// Why it cannot be read.
    pub reason: String,
}

/// Keeps unreadable records for an operator, before they are acked.
#[async_trait]
pub trait Quarantine: Send + Sync + 'static {
    /// Stores the records; durable when it returns. Storing a record twice is harmless.
    async fn quarantine(&self, group: &str, poison: &[Poison]) -> Result<(), StoreError>;
}

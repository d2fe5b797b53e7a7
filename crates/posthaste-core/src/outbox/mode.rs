use std::fmt;

use serde::{Deserialize, Serialize};

use super::OutboxStatus;

/// The kind of reader that a table has. It never changes: an event that one kind cannot route could belong to the
/// other kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Listeners in this process, one source for all event types.
    Dispatcher,
    /// The event hub's channels, one source per event type.
    Channels,
}

impl Reader {
    /// The name that the database stores.
    pub fn word(self) -> &'static str {
        match self {
            Self::Dispatcher => "dispatcher",
            Self::Channels => "channels",
        }
    }
}

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// How the processes that read a table avoid claiming the same rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One process reads at a time and keeps its claims in memory, under a leased and fenced owner row: one write per
    /// event. A second process waits until the ownership is released or its lease ends.
    SingleNode,
    /// Any number of processes read, and each leases the rows that it claims: two writes per event.
    MultiNode,
    /// As multi node, and the events of one aggregate are delivered one after the other, in the order of their
    /// insertion, through retries and whichever process delivers them.
    Ordered(DeadHead),
    /// This process only writes. Another process reads the table, or a tool for change data capture.
    WriterOnly,
}

/// What happens to the later events of an aggregate when one of them is dead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadHead {
    /// They wait until an operator replays or discards the dead one.
    #[default]
    Block,
    /// They are delivered without it. When it is replayed later, it may be delivered at the same time as one of them.
    Skip,
}

impl DeadHead {
    /// The name that the database stores.
    pub fn word(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Skip => "skip",
        }
    }
}

impl Mode {
    /// Ordered, and a dead event blocks its aggregate.
    pub const ORDERED: Self = Self::Ordered(DeadHead::Block);

    /// The name that the database stores.
    pub fn word(self) -> &'static str {
        match self {
            Self::SingleNode => "single_node",
            Self::MultiNode => "multi_node",
            Self::Ordered(_) => "ordered",
            Self::WriterOnly => "writer_only",
        }
    }

    /// What happens to the events after a dead one; `None` in a mode without order.
    pub fn dead_head(self) -> Option<DeadHead> {
        match self {
            Self::Ordered(rule) => Some(rule),
            Self::SingleNode | Self::MultiNode | Self::WriterOnly => None,
        }
    }

    /// Ordered mode: true if a row of this status no longer blocks the later rows of its aggregate.
    pub fn is_finished(self, status: OutboxStatus) -> bool {
        match status {
            OutboxStatus::Done => true,
            OutboxStatus::Dead => self == Self::Ordered(DeadHead::Skip),
            OutboxStatus::New | OutboxStatus::Retry => false,
        }
    }

    /// True if the events of one aggregate are delivered one after the other.
    pub fn is_ordered(self) -> bool {
        matches!(self, Self::Ordered(_))
    }

    /// True if rows are leased one by one.
    pub fn leases_rows(self) -> bool {
        matches!(self, Self::MultiNode | Self::Ordered(_))
    }

    /// True if a writer may insert rows pre-claimed.
    pub fn is_hot(self) -> bool {
        matches!(self, Self::SingleNode | Self::MultiNode)
    }
}

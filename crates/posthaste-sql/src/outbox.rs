//! What an outbox is in every database: its words, and what a process remembers of its claims.

use std::fmt;

use posthaste_core::Failure;

pub(crate) use self::headers::{read_headers, write_headers};
pub(crate) use self::holdings::Holdings;
pub use self::rows::{OutboxItem, OutboxRow, OutboxStatus};

mod headers;
mod holdings;
mod rows;

/// What the payloads of one claim may bring into memory, but for one that is larger alone.
pub(crate) const MAX_CLAIM_BYTES: usize = 16 << 20;

/// How much of a failure a row keeps, in characters.
const LONGEST_ERROR: usize = 4_000;

/// Which kind of reader a table has. It has one for good: an event that the one kind cannot route would be the
/// other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    /// Listeners in this process, one source for all event types.
    Dispatcher,
    /// The event hub's channels, one source per event type.
    Channels,
}

impl Reader {
    pub(crate) fn word(self) -> &'static str {
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

/// How the processes that read a table keep out of each other's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One process reads at a time and claims in its memory, under a leased and fenced owner row: one write per event.
    /// A second one waits until the first gave it up.
    SingleNode,
    /// Any number of processes read, and each leases the rows that it claims: two writes per event.
    MultiNode,
}

#[cfg(feature = "postgres")]
impl Mode {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::SingleNode => "single_node",
            Self::MultiNode => "multi_node",
        }
    }
}

/// A failure as a row keeps it.
pub(crate) fn error_text(failure: &Failure) -> String {
    let text = failure.to_string();
    match text.char_indices().nth(LONGEST_ERROR) {
        None => text,
        Some(_) => text.chars().take(LONGEST_ERROR - 3).chain("...".chars()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_cut_at_whole_characters() {
        let of = |length: usize| error_text(&Failure::transient("c", "é".repeat(length)));
        assert_eq!(of(LONGEST_ERROR - 3), format!("c: {}", "é".repeat(LONGEST_ERROR - 3)));
        let cut = of(LONGEST_ERROR);
        assert_eq!(cut.chars().count(), LONGEST_ERROR);
        assert!(cut.ends_with("é..."));
    }
}

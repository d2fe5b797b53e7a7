use std::time::Duration;

use crate::{Disposition, Failure};

/// How much of a failure a row keeps, in characters.
const LONGEST_ERROR: usize = 4_000;

/// Where an event stands in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutboxStatus {
    /// Not tried yet, or asked to wait.
    New,
    /// Delivered.
    Done,
    /// Failed, and will be tried again.
    Retry,
    /// Given up.
    Dead,
}

impl OutboxStatus {
    /// Of the number in the column `status`.
    pub fn of_code(code: i64) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Done,
            2 => Self::Retry,
            _ => Self::Dead,
        }
    }

    /// The number in the column `status`.
    pub fn code(self) -> i16 {
        match self {
            Self::New => 0,
            Self::Done => 1,
            Self::Retry => 2,
            Self::Dead => 3,
        }
    }
}

/// What is to be recorded of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowUpdate {
    /// Which row.
    pub seq: i64,
    /// What it becomes.
    pub status: OutboxStatus,
    /// What its attempts become, where the attempt counts. A number and not one more: who repeats a change because its
    /// answer was lost does not count twice.
    pub attempts: Option<u32>,
    /// From `now`, when it is due again; `None` leaves `available_at` alone.
    pub wait: Option<Duration>,
    /// Replaces `last_error` where there is one; short enough to be stored.
    pub error: Option<String>,
}

impl RowUpdate {
    /// What follows from the disposition of this attempt.
    pub fn of(seq: i64, attempt: u32, disposition: &Disposition) -> Self {
        match disposition {
            Disposition::Done => Self { seq, status: OutboxStatus::Done, attempts: None, wait: None, error: None },
            Disposition::Retry { after, counted, failure } => Self {
                seq,
                // A wait that nobody is to blame for leaves the row as good as new.
                status: if *counted || failure.is_some() { OutboxStatus::Retry } else { OutboxStatus::New },
                attempts: counted.then_some(attempt),
                wait: Some(*after),
                error: failure.as_ref().map(error_text),
            },
            Disposition::Dead(failure) => Self::dead(seq, failure),
        }
    }

    /// The row is given up.
    pub fn dead(seq: i64, failure: &Failure) -> Self {
        Self { seq, status: OutboxStatus::Dead, attempts: None, wait: None, error: Some(error_text(failure)) }
    }
}

/// A failure as a row keeps it.
fn error_text(failure: &Failure) -> String {
    // No database but one keeps U+0000 in a text, and nobody would see it.
    let text = failure.to_string().replace('\0', "\u{fffd}");
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

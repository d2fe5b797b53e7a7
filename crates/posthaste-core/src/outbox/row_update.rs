use std::time::Duration;

use crate::{Disposition, Failure};

/// The longest error text of a row, in characters.
const LONGEST_ERROR: usize = 4_000;

/// The status of an event in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutboxStatus {
    /// Not tried yet, or snoozed.
    New,
    /// Delivered.
    Done,
    /// Failed, and will be tried again.
    Retry,
    /// Given up.
    Dead,
}

impl OutboxStatus {
    /// The status with this number in the column `status`.
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

/// The update that settles one row.
#[derive(Clone, Debug, PartialEq)]
pub struct RowUpdate {
    /// The number of the row.
    pub seq: i64,
    /// The new status.
    pub status: OutboxStatus,
    /// The new number of attempts, if the attempt counts. A number and not an increment: a settlement that is repeated
    /// because its result was lost does not count twice.
    pub attempts: Option<u32>,
    /// How long from `now` until it is due again; `None` leaves `available_at` alone.
    pub wait: Option<Duration>,
    /// The new `last_error`, short enough to be stored; `None` leaves `last_error` alone.
    pub error: Option<String>,
}

impl RowUpdate {
    /// The update for the disposition of this attempt.
    pub fn of(seq: i64, attempt: u32, disposition: &Disposition) -> Self {
        match disposition {
            Disposition::Done => Self { seq, status: OutboxStatus::Done, attempts: None, wait: None, error: None },
            Disposition::Retry { after, counted, failure } => Self {
                seq,
                // A snooze is not a failure, so the row becomes NEW again.
                status: if *counted || failure.is_some() { OutboxStatus::Retry } else { OutboxStatus::New },
                attempts: counted.then_some(attempt),
                wait: Some(*after),
                error: failure.as_ref().map(error_text),
            },
            Disposition::Dead(failure) => Self::dead(seq, failure),
        }
    }

    /// The update that makes a row DEAD.
    pub fn dead(seq: i64, failure: &Failure) -> Self {
        Self { seq, status: OutboxStatus::Dead, attempts: None, wait: None, error: Some(error_text(failure)) }
    }
}

/// The text of a failure for `last_error`.
fn error_text(failure: &Failure) -> String {
    // Only one of the databases can store U+0000 in a text, and it is invisible.
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

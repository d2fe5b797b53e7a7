//! The parts of lists that all databases share. They contain no SQL.

use std::cmp::Reverse;

use posthaste_core::hub_store::{QuarantineCursor, QuarantinePage, QuarantinedRow};

/// A list is counted up to this number.
pub(crate) const COUNTED: i64 = 10_000;

/// The text, escaped for a LIKE pattern whose escape character is a backslash.
pub(crate) fn literal(text: &str) -> String {
    text.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_")
}

/// How many characters of the key and of the reason of a quarantined record a list shows: both come from outside.
pub(crate) const SHOWN_KEY: usize = 256;
pub(crate) const SHOWN_REASON: usize = 1_000;

/// A page of the records of several statuses. Each status was read in the order of the list, up to one record more than
/// the limit: if there is one more, there is a next page. A record whose status changed between the reads may have been
/// read twice.
pub(crate) fn quarantine_page(mut items: Vec<QuarantinedRow>, counted: i64, limit: u32) -> QuarantinePage {
    items.sort_by(|a, b| Reverse((a.created_at, &a.id)).cmp(&Reverse((b.created_at, &b.id))));
    items.dedup_by(|a, b| a.id == b.id);
    let has_more = items.len() > limit as usize;
    items.truncate(limit as usize);
    QuarantinePage {
        next: items.last().filter(|_| has_more).map(QuarantineCursor::after),
        total: counted.min(COUNTED).unsigned_abs(),
        total_is_lower_bound: counted > COUNTED,
        items,
    }
}

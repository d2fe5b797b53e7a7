use chrono::{DateTime, Utc};

use crate::outbox;
pub(super) use crate::outbox::{micros, span};

/// The database's clock when it received the statement. Not `clock_timestamp()`: that may change while the statement
/// runs, so no index can be searched with it. Not `now()`: that is the beginning of the transaction.
pub(super) const NOW: &str = "statement_timestamp()";

/// The database's clock at this moment. For leases: a statement may begin before another process renews its lease, and
/// see the renewed lease. By the clock at the beginning of the statement, that lease would end too far in the future.
pub(super) const CLOCK: &str = "clock_timestamp()";

/// The nearest time that the table accepts.
pub(super) fn storable(at: DateTime<Utc>) -> DateTime<Utc> {
    outbox::storable(at, earliest())
}

/// The earliest time that the table accepts.
pub(super) fn earliest() -> DateTime<Utc> {
    const FIRST_SECOND: i64 = -62_135_596_800;
    DateTime::from_timestamp(FIRST_SECOND, 0).unwrap_or_default()
}

//! The parts of the audit log that all databases share. They contain no SQL statements.

use posthaste_core::hub_store::{AuditCursor, AuditEntry, AuditFilter, AuditPage, AuditPageRequest, LogType};

use crate::list::COUNTED;

/// Nearly all deliveries have this status, so no index has it.
pub(crate) const USUAL_STATUS: u16 = 200;

/// The name of the index of one part of a list, and the columns that it begins with, before time and id.
pub(crate) fn index_of(filter: &AuditFilter, part: Option<LogType>) -> (Option<&'static str>, &'static [&'static str]) {
    let has_index = filter.status_code.is_some_and(|status| status != USUAL_STATUS);
    match part {
        _ if filter.event_id.is_some() => (Some("audit_log_event"), &["event_id"]),
        Some(_) if filter.subscription_id.is_some() => {
            (Some("audit_log_subscription"), &["subscription_id", "log_type"])
        }
        Some(_) if has_index => (Some("audit_log_status"), &["status_code", "log_type"]),
        Some(_) => (Some("audit_log_type"), &["log_type"]),
        None => (None, &[]),
    }
}

/// The page of these entries, which are one more than requested if there is a next page.
pub(crate) fn page(mut items: Vec<AuditEntry>, found: usize, counted: i64, request: &AuditPageRequest) -> AuditPage {
    let has_more = found > request.size as usize;
    items.truncate(request.size as usize);
    AuditPage {
        next: items.last().filter(|_| has_more).map(|last| AuditCursor { at: last.at, id: last.id.clone() }),
        total: counted.min(COUNTED).unsigned_abs(),
        total_is_lower_bound: counted > COUNTED,
        items,
    }
}

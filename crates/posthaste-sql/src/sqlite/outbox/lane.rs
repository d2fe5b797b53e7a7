use posthaste_core::Wakeup;

use super::rows;
use crate::TableName;
use crate::outbox::Holdings;

/// What the sources of one name share: their signal, and what they hold.
pub(super) struct Lane {
    /// `None` for all event types.
    pub(super) event_type: Option<String>,
    /// What it claims with, see [`rows::pending`].
    pub(super) pending: String,
    /// See [`rows::next_due`].
    pub(super) next_due: String,
    pub(super) wakeup: Wakeup,
    /// One claim at a time: between a claim's reading of what is held and its holding more, nobody else may hold.
    pub(super) claiming: tokio::sync::Mutex<()>,
    pub(super) holdings: Holdings,
}

impl Lane {
    /// The empty name stands for all event types.
    pub(super) fn new(table: &TableName, name: &str) -> Self {
        let event_type = (!name.is_empty()).then(|| name.to_owned());
        Self {
            pending: rows::pending(table, event_type.is_some()),
            next_due: rows::next_due(table, event_type.is_some()),
            event_type,
            wakeup: Wakeup::default(),
            claiming: tokio::sync::Mutex::new(()),
            holdings: Holdings::default(),
        }
    }
}

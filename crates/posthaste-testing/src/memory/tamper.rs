use std::time::Duration;

use super::{MemoryDatabase, in_micros};

/// Changes that another program may make to a table.
impl MemoryDatabase {
    /// Replaces the headers of a row with text that is not a JSON object, so that the row cannot be decoded.
    ///
    /// # Panics
    ///
    /// When there is no such row.
    pub fn break_headers(&self, table: &str, event_id: &str) {
        self.change(table, event_id, |row| row.is_readable = false);
    }

    /// Moves the times at which a row was written, finished and leased back by this much.
    ///
    /// # Panics
    ///
    /// When there is no such row.
    pub fn age(&self, table: &str, event_id: &str, by: Duration) {
        let by = in_micros(by);
        self.change(table, event_id, |row| {
            row.created_at -= by;
            row.done_at = row.done_at.map(|done_at| done_at - by);
            row.locked_at -= by;
        });
    }

    /// Simulates a database clock that was set back: every lease of a table began this much later.
    pub fn set_clock_back(&self, table: &str, by: Duration) {
        if let Some(table) = self.lock().tables.get_mut(table) {
            table.move_leases(in_micros(by));
        }
    }

    fn change(&self, table: &str, event_id: &str, change: impl FnOnce(&mut super::table::Row)) {
        let mut state = self.lock();
        let rows = state.tables.get_mut(table).expect("a table of this name is open");
        let seq = rows.row_of(event_id).expect("there is such a row").seq;
        rows.change(seq, change);
    }
}

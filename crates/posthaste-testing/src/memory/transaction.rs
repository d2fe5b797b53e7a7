use std::ops::{Deref, DerefMut};

use posthaste_core::outbox::{InTransaction, TableName, Transaction};
use posthaste_core::{Event, FaultKind, StoreError};

use super::table::Row;
use super::{MemoryDatabase, MemoryOutbox};

/// A transaction on a [`MemoryDatabase`]. Its rows appear at the commit. Dropping it without a commit rolls it back.
pub struct MemoryTransaction {
    connection: MemoryConnection,
    ended: bool,
}

/// The connection on which the statements of a service run.
pub struct MemoryConnection {
    database: MemoryDatabase,
    staged: Vec<(TableName, Row)>,
}

impl MemoryTransaction {
    pub(super) fn new(database: MemoryDatabase) -> Self {
        Self { connection: MemoryConnection { database, staged: Vec::new() }, ended: false }
    }

    /// Commits all rows of the transaction at once.
    pub async fn commit(mut self) -> Result<(), StoreError> {
        let MemoryConnection { database, staged } = &mut self.connection;
        let mut state = database.lock();
        let failed = |kind, reason: &str| Err(StoreError::new("commit", kind, reason));
        if state.failing_commits > 0 {
            state.failing_commits -= 1;
            drop(state);
            return failed(FaultKind::Transient, "a test made the in-memory database fail");
        }
        // Another transaction may have committed the same id since the insert.
        let known = |(table, row): &(TableName, Row)| {
            state.tables.get(table.as_str()).is_some_and(|table| table.row_of(row.event.id()).is_some())
        };
        if let Some((_, row)) = staged.iter().find(|staged| known(staged)) {
            let error = duplicate("commit", row.event.id());
            drop(state);
            return Err(error);
        }
        for (table, row) in staged.drain(..) {
            state.table(&table).insert(row);
        }
        state.commits += 1;
        let is_lost = state.lost_commits > 0;
        state.lost_commits -= usize::from(is_lost);
        drop(state);
        self.ended = true;
        match is_lost {
            true => failed(FaultKind::OutcomeUnknown, "a test made the in-memory database lose the answer"),
            false => Ok(()),
        }
    }

    /// Rolls the transaction back.
    pub async fn rollback(self) -> Result<(), StoreError> {
        drop(self);
        Ok(())
    }
}

impl MemoryConnection {
    pub(super) fn insert(
        &mut self,
        database: &MemoryDatabase,
        table: &TableName,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        let doing = format!("insert into {table}");
        if !self.database.is_same(database) {
            return Err(StoreError::new(
                doing,
                FaultKind::Permanent,
                "the transaction belongs to another in-memory database",
            ));
        }
        let now = database.now();
        let mut state = database.statement(&doing)?;
        let rows = state.table(table);
        // As in a real database, an insert that fails uses up its numbers.
        let new: Vec<Row> = events.iter().map(|event| Row::new(rows.next_seq(), event, claim_id, now)).collect();
        for (index, row) in new.iter().enumerate() {
            let id = row.event.id();
            let is_staged = self.staged.iter().any(|(staged, row)| staged == table && row.event.id() == id);
            if is_staged || rows.row_of(id).is_some() || new[..index].iter().any(|row| row.event.id() == id) {
                return Err(duplicate(&doing, id));
            }
        }
        let numbers = new.iter().map(|row| row.seq).collect();
        self.staged.extend(new.into_iter().map(|row| (table.clone(), row)));
        Ok(numbers)
    }

    /// The rows that a commit would insert.
    #[doc(hidden)]
    pub fn staged(&self) -> impl Iterator<Item = &Row> {
        self.staged.iter().map(|(_, row)| row)
    }
}

fn duplicate(doing: &str, id: &str) -> StoreError {
    StoreError::new(doing, FaultKind::Permanent, format!("event id {id} already exists"))
}

impl Deref for MemoryTransaction {
    type Target = MemoryConnection;

    fn deref(&self) -> &MemoryConnection {
        &self.connection
    }
}

impl DerefMut for MemoryTransaction {
    fn deref_mut(&mut self) -> &mut MemoryConnection {
        &mut self.connection
    }
}

impl Drop for MemoryTransaction {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.database.lock().rollbacks += 1;
        }
    }
}

/// The outbox cannot see the end of a transaction that it did not begin.
impl InTransaction<MemoryOutbox> for MemoryTransaction {
    fn connection(&mut self) -> &mut MemoryConnection {
        &mut self.connection
    }

    fn begun_by_outbox(&mut self) -> Option<&mut Transaction<MemoryOutbox>> {
        None
    }
}

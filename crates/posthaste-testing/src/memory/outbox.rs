use std::collections::HashSet;
use std::sync::MutexGuard;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{
    BlockedRows, ClaimRequest, ClaimStore, ClaimedRows, LeaseSet, LeaseStore, Mode, Notifier, Owner, OwnershipStore,
    Position, Reader, Registration, RowUpdate, SettleStore, SettledRows, Store, TableName, WriteStore,
};
use posthaste_core::{Event, StoreError, Wakeup};

use super::claim::View;
use super::{MemoryConnection, MemoryDatabase, MemoryTransaction, State, in_micros};

/// An outbox table of a [`MemoryDatabase`], in any mode.
#[derive(Clone)]
pub struct MemoryOutbox {
    pub(super) database: MemoryDatabase,
    pub(super) table: TableName,
    mode: Mode,
}

impl MemoryOutbox {
    pub(super) fn new(database: MemoryDatabase, table: TableName, mode: Mode) -> Self {
        Self { database, table, mode }
    }

    /// Locks the database's state for one statement, and returns it with the database's time.
    pub(super) fn statement(&self, doing: &str) -> Result<(MutexGuard<'_, State>, i64), StoreError> {
        let now = self.database.now();
        Ok((self.database.statement(&format!("{doing} {}", self.table))?, now))
    }
}

impl Store for MemoryOutbox {
    fn table(&self) -> &TableName {
        &self.table
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn notifier(&self) -> Option<&dyn Notifier> {
        Some(self)
    }

    /// The store uses the paused clock of the test, which the runtime of another thread does not have.
    fn runs_on_own_thread(&self) -> bool {
        false
    }
}

#[async_trait]
impl OwnershipStore for MemoryOutbox {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        let (mut state, _) = self.statement("register as a reader of")?;
        let asked = Registration::of(reader, self.mode, lease);
        let recorded = state.table(&self.table).registration.get_or_insert_with(|| asked.clone());
        if recorded.reader == asked.reader && recorded.mode == asked.mode {
            recorded.lease = recorded.lease.or(asked.lease);
            recorded.dead_head = recorded.dead_head.take().or(asked.dead_head);
        }
        Ok(recorded.clone())
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        let (mut state, _) = self.statement("look who reads")?;
        Ok(state.table(&self.table).registration.clone())
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        let (mut state, now) = self.statement("acquire the ownership of")?;
        Ok(state.table(&self.table).acquire_ownership(owner, in_micros(lease), now))
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        let (mut state, _) = self.statement("release the ownership of")?;
        state.table(&self.table).release_ownership(owner);
        Ok(())
    }
}

#[async_trait]
impl WriteStore for MemoryOutbox {
    type Connection = MemoryConnection;
    type Transaction = MemoryTransaction;

    fn is_cancel_safe(&self) -> bool {
        true
    }

    async fn begin(&self) -> Result<MemoryTransaction, StoreError> {
        self.database.begin().await
    }

    async fn commit(&self, transaction: MemoryTransaction) -> Result<(), StoreError> {
        transaction.commit().await
    }

    async fn rollback(&self, transaction: MemoryTransaction) -> Result<(), StoreError> {
        transaction.rollback().await
    }

    async fn insert(
        &self,
        connection: &mut MemoryConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        connection.insert(&self.database, &self.table, events, claim_id)
    }

    async fn surviving(&self, _: &mut MemoryConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        drop(self.statement("look at rows of a transaction in")?);
        Ok(rows.iter().copied().collect())
    }
}

#[async_trait]
impl ClaimStore for MemoryOutbox {
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        let (mut state, now) = self.statement("claim from")?;
        Ok(state.table(&self.table).claim(&View::new(self.mode, request, now)))
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        let (mut state, now) = self.statement("look what is due in")?;
        let due = state.table(&self.table).next_due(&View::new(self.mode, request, now));
        Ok(due.map(|due| Duration::from_micros(due.saturating_sub(now).max(0) as u64)))
    }

    /// No row is ever marked as blocked here: a claim looks for the rows before it each time.
    async fn blocked_rows(&self, _: Option<Position>, _: usize) -> Result<BlockedRows, StoreError> {
        Ok(BlockedRows::default())
    }

    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        Ok(rows.iter().copied().collect())
    }

    async fn unblock_rows(&self, _: &[i64]) -> Result<(), StoreError> {
        Ok(())
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        let (mut state, now) = self.statement("look for event types in")?;
        let types = state.table(&self.table).oldest_due_by_type(now);
        Ok(types.into_iter().map(|(event_type, _)| event_type).collect())
    }
}

#[async_trait]
impl SettleStore for MemoryOutbox {
    async fn settle(&self, fencing_tokens: &[String], updates: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        let (mut state, now) = self.statement("settle in")?;
        let table = state.table(&self.table);
        let claim_ids = match self.mode.leases_rows() {
            true => Some(fencing_tokens),
            false if table.fencing_token().is_some_and(|token| fencing_tokens.contains(&token)) => None,
            false => return Ok(SettledRows::default()),
        };
        let applied = updates.iter().filter(|update| table.settle(update, claim_ids, now));
        let applied = applied.map(|update| update.seq).collect();
        Ok(SettledRows { applied, locked: HashSet::new() })
    }
}

#[async_trait]
impl LeaseStore for MemoryOutbox {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        let (mut state, now) = self.statement("renew leases in")?;
        let table = state.table(&self.table);
        let mut renewed = SettledRows::default();
        for seq in rows {
            if table.row(*seq).is_some_and(|row| row.is_pending() && row.is_claimed_by(claim_ids)) {
                table.change(*seq, |row| row.locked_at = now);
                renewed.applied.insert(*seq);
            }
        }
        Ok(renewed)
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        let (mut state, _) = self.statement("release in")?;
        let table = state.table(&self.table);
        let (claim_ids, found): (_, HashSet<i64>) = match leases {
            LeaseSet::Rows { claim_ids, rows } => (claim_ids, rows.iter().copied().collect()),
            LeaseSet::Events { claim_ids, ids } => {
                (claim_ids, ids.iter().filter_map(|id| table.row_of(id).map(|row| row.seq)).collect())
            }
            LeaseSet::Claims { claim_ids } => {
                (claim_ids, table.rows().filter(|row| row.is_claimed_by(claim_ids)).map(|row| row.seq).collect())
            }
        };
        let seen: HashSet<i64> = found.into_iter().filter(|seq| table.row(*seq).is_some()).collect();
        for seq in &seen {
            if table.row(*seq).is_some_and(|row| row.is_claimed_by(claim_ids)) {
                table.change(*seq, |row| row.locked_by = None);
            }
        }
        Ok(SettledRows { applied: seen, ..SettledRows::default() })
    }

    async fn mark_started(
        &self,
        claim_id: &str,
        started_claim_id: &str,
        rows: &[i64],
    ) -> Result<HashSet<i64>, StoreError> {
        let (mut state, now) = self.statement("start suspects of")?;
        let table = state.table(&self.table);
        let is_ours = |seq: &i64| table.row(*seq).is_some_and(|row| row.locked_by.as_deref() == Some(claim_id));
        let ours: HashSet<i64> = rows.iter().copied().filter(is_ours).collect();
        for seq in &ours {
            table.change(*seq, |row| {
                row.locked_by = Some(started_claim_id.to_owned());
                row.locked_at = now;
            });
        }
        Ok(ours)
    }
}

#[async_trait]
impl Notifier for MemoryOutbox {
    async fn notify(&self) -> Result<(), StoreError> {
        let (mut state, _) = self.statement("notify the listeners of")?;
        state.table(&self.table).listeners.values().for_each(Wakeup::wake);
        Ok(())
    }

    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError> {
        let _listening = Listening::start(self, wakeup.clone())?;
        wakeup.wake();
        std::future::pending().await
    }
}

/// Removes the listener when the listening future is dropped.
struct Listening<'a> {
    outbox: &'a MemoryOutbox,
    number: u64,
}

impl<'a> Listening<'a> {
    fn start(outbox: &'a MemoryOutbox, wakeup: Wakeup) -> Result<Self, StoreError> {
        let (mut state, _) = outbox.statement("listen for notifications of")?;
        let table = state.table(&outbox.table);
        table.last_listener += 1;
        table.listeners.insert(table.last_listener, wakeup);
        Ok(Self { outbox, number: table.last_listener })
    }
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        self.outbox.database.lock().table(&self.outbox.table).listeners.remove(&self.number);
    }
}

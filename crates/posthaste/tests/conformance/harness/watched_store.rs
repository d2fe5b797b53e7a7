use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste::{DeadFilter, Event, FaultKind, Mode, OpenError, OutboxRow, Pool, StoreError, TableName};
use posthaste_core::outbox::{
    BlockedRows, ClaimRequest, ClaimStore, ClaimedRows, LeaseSet, LeaseStore, Notifier, OperatorStore, Owner,
    OwnershipStore, Position, Purge, Reader, Registration, RowUpdate, SettleStore, SettledRows, Store, WriteStore,
};

/// The calls that a store got, and the calls that it is to refuse.
#[derive(Clone, Default)]
pub struct CallLog(Arc<Mutex<Calls>>);

#[derive(Default)]
struct Calls {
    /// By statement: the number of rows of each call.
    calls: HashMap<&'static str, Vec<usize>>,
    refusals: HashMap<&'static str, usize>,
    lost_answers: HashMap<&'static str, usize>,
}

impl CallLog {
    /// The number of rows that each call of this statement was to insert, claim, settle or purge.
    pub fn calls(&self, statement: &str) -> Vec<usize> {
        self.0.lock().unwrap().calls.get(statement).cloned().unwrap_or_default()
    }

    /// The next calls of this statement fail as if the database were out of reach.
    pub fn refuse(&self, statement: &'static str, calls: usize) {
        self.0.lock().unwrap().refusals.insert(statement, calls);
    }

    /// The next calls of this statement are executed, and their answers are lost.
    pub fn lose_answers(&self, statement: &'static str, calls: usize) {
        self.0.lock().unwrap().lost_answers.insert(statement, calls);
    }

    /// The number of answers that are still to be lost.
    pub fn lost_answers(&self, statement: &str) -> usize {
        self.0.lock().unwrap().lost_answers.get(statement).copied().unwrap_or_default()
    }

    fn answer<T>(&self, statement: &'static str, answer: T) -> Result<T, StoreError> {
        match self.0.lock().unwrap().lost_answers.get_mut(statement) {
            Some(lost) if *lost > 0 => {
                *lost -= 1;
                Err(StoreError::new(statement, FaultKind::OutcomeUnknown, "the test lost the answer"))
            }
            _ => Ok(answer),
        }
    }

    /// The number of calls that are still to be refused.
    pub fn refusals(&self, statement: &str) -> usize {
        self.0.lock().unwrap().refusals.get(statement).copied().unwrap_or_default()
    }

    fn note(&self, statement: &'static str, about: usize) -> Result<(), StoreError> {
        let mut log = self.0.lock().unwrap();
        log.calls.entry(statement).or_default().push(about);
        match log.refusals.get_mut(statement) {
            Some(refusals) if *refusals > 0 => {
                *refusals -= 1;
                Err(StoreError::new(statement, FaultKind::Transient, "the test said so"))
            }
            _ => Ok(()),
        }
    }
}

/// A pool whose stores log their calls.
pub struct WatchedPool<P> {
    pub pool: P,
    pub call_log: CallLog,
}

/// A store that logs its calls.
pub struct Watched<S> {
    store: S,
    call_log: CallLog,
}

#[async_trait]
impl<S: Store, P: Pool<S>> Pool<Watched<S>> for WatchedPool<P> {
    async fn open(&self, table: TableName, mode: Mode) -> Result<Watched<S>, OpenError> {
        self.call_log.note("open", 0)?;
        Ok(Watched { store: self.pool.open(table, mode).await?, call_log: self.call_log.clone() })
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<Watched<S>, OpenError> {
        self.call_log.note("open", 0)?;
        Ok(Watched { store: self.pool.open_existing(table, mode).await?, call_log: self.call_log.clone() })
    }
}

impl<S: Store> Store for Watched<S> {
    fn notifier(&self) -> Option<&dyn Notifier> {
        self.store.notifier()
    }

    fn table(&self) -> &TableName {
        self.store.table()
    }

    fn mode(&self) -> Mode {
        self.store.mode()
    }

    fn runs_on_own_thread(&self) -> bool {
        self.store.runs_on_own_thread()
    }
}

#[async_trait]
impl<S: Store> OwnershipStore for Watched<S> {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        self.call_log.note("register", 0)?;
        self.store.register(reader, lease).await
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        self.call_log.note("registered", 0)?;
        self.store.registered().await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        self.call_log.note("acquire_ownership", 0)?;
        self.store.acquire_ownership(owner, lease).await
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        self.call_log.note("release_ownership", 0)?;
        self.store.release_ownership(owner).await
    }
}

#[async_trait]
impl<S: Store> WriteStore for Watched<S> {
    type Connection = S::Connection;
    type Transaction = S::Transaction;

    fn is_cancel_safe(&self) -> bool {
        self.store.is_cancel_safe()
    }

    async fn begin(&self) -> Result<S::Transaction, StoreError> {
        self.call_log.note("begin", 0)?;
        self.store.begin().await
    }

    async fn commit(&self, transaction: S::Transaction) -> Result<(), StoreError> {
        self.call_log.note("commit", 0)?;
        self.store.commit(transaction).await
    }

    async fn rollback(&self, transaction: S::Transaction) -> Result<(), StoreError> {
        self.call_log.note("rollback", 0)?;
        self.store.rollback(transaction).await
    }

    async fn insert(
        &self,
        connection: &mut S::Connection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        self.call_log.note("insert", events.len())?;
        self.store.insert(connection, events, claim_id).await
    }

    async fn surviving(&self, connection: &mut S::Connection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        self.call_log.note("surviving", rows.len())?;
        self.store.surviving(connection, rows).await
    }
}

#[async_trait]
impl<S: Store> ClaimStore for Watched<S> {
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        self.call_log.note("claim", request.limit)?;
        let claimed = self.store.claim(request).await?;
        match claimed.rows.is_empty() {
            true => Ok(claimed),
            false => self.call_log.answer("claim", claimed),
        }
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        self.call_log.note("next_due", 0)?;
        self.store.next_due(request).await
    }

    async fn blocked_rows(&self, after: Option<Position>, limit: usize) -> Result<BlockedRows, StoreError> {
        self.call_log.note("blocked_rows", limit)?;
        self.store.blocked_rows(after, limit).await
    }

    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        self.call_log.note("unlocked_unfinished", rows.len())?;
        self.store.unlocked_unfinished(rows).await
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError> {
        self.call_log.note("unblock_rows", rows.len())?;
        self.store.unblock_rows(rows).await
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        self.store.pending_types().await
    }
}

#[async_trait]
impl<S: Store> SettleStore for Watched<S> {
    async fn settle(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        self.call_log.note("settle", changes.len())?;
        self.store.settle(fencing_tokens, changes).await
    }
}

#[async_trait]
impl<S: Store> LeaseStore for Watched<S> {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        self.call_log.note("renew", rows.len())?;
        self.store.renew(claim_ids, rows).await
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        let rows = if let LeaseSet::Rows { rows, .. } = leases { rows.len() } else { 0 };
        self.call_log.note("release", rows)?;
        self.store.release(leases).await
    }

    async fn mark_started(&self, claim_id: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        self.call_log.note("mark_started", rows.len())?;
        self.store.mark_started(claim_id, started, rows).await
    }
}

#[async_trait]
impl<S: Store> OperatorStore for Watched<S> {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.call_log.note("find", 0)?;
        self.store.find(event_id).await
    }

    async fn dead(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError> {
        self.call_log.note("dead", limit)?;
        self.store.dead(filter, limit).await
    }

    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError> {
        self.store.count_pending(limit).await
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        self.call_log.note("count_dead", 0)?;
        self.store.count_dead(filter).await
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<(u64, i64), StoreError> {
        self.call_log.note("replay", limit)?;
        self.store.replay(filter, after, limit).await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        self.call_log.note("discard", 0)?;
        self.store.discard(event_id).await
    }

    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        self.call_log.note("purge", limit)?;
        self.store.purge(purge, older_than, limit).await
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.call_log.note("oldest_due", 0)?;
        self.store.oldest_due().await
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        self.call_log.note("oldest_unblocked", 0)?;
        self.store.oldest_unblocked().await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.call_log.note("oldest_due_by_type", 0)?;
        self.store.oldest_due_by_type().await
    }
}

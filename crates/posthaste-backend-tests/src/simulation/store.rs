use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::outbox::{
    BlockedRows, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, DeadFilter, InTransaction, LeaseSet, LeaseStore,
    Mode, Notifier, OpenError, OperatorStore, OutboxRow, OutboxStatus, Owner, OwnershipStore, Pool, Position, Purge,
    Reader, Registration, RowUpdate, SettleStore, SettledRows, Store, TableName, Transaction, WriteStore,
};
use posthaste_core::{Event, FaultKind, StoreError, Wakeup};
use tokio::time::sleep;

use super::world::{Fault, Life, World};
use super::{Sabotage, TABLE};
use posthaste_testing::{MemoryConnection, MemoryOutbox, MemoryTransaction};

/// The database as a node sees it, with faults.
pub(super) struct FaultyDatabase {
    pub(super) world: World,
    pub(super) life: Arc<Life>,
}

/// The outbox table of a [`FaultyDatabase`].
pub(super) struct FaultyStore {
    world: World,
    life: Arc<Life>,
    store: MemoryOutbox,
}

#[async_trait]
impl Pool<FaultyStore> for FaultyDatabase {
    async fn open(&self, table: TableName, mode: Mode) -> Result<FaultyStore, OpenError> {
        let store = self.world.database.open(table, mode).await?;
        Ok(FaultyStore { world: self.world.clone(), life: self.life.clone(), store })
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<FaultyStore, OpenError> {
        self.open(table, mode).await
    }
}

impl InTransaction<FaultyStore> for MemoryTransaction {
    fn connection(&mut self) -> &mut MemoryConnection {
        self
    }

    fn begun_by_outbox(&mut self) -> Option<&mut Transaction<FaultyStore>> {
        None
    }
}

fn cut_off(kind: FaultKind) -> StoreError {
    StoreError::new("reach the database", kind, "simulated")
}

/// Injects a fault before a statement.
async fn on_the_way(world: &World, life: &Life) -> Result<Fault, StoreError> {
    let fault = world.fault();
    life.suffer(fault).await;
    if let Some(latency) = world.latency() {
        sleep(latency).await;
        life.step().await;
    }
    match fault {
        Fault::Refuse => Err(cut_off(FaultKind::Transient)),
        fault => Ok(fault),
    }
}

/// Injects a fault after a statement.
async fn on_the_way_back(world: &World, life: &Life, before: Fault) -> Result<(), StoreError> {
    life.suffer(world.fault()).await;
    match before {
        Fault::LoseAnswer => Err(cut_off(FaultKind::OutcomeUnknown)),
        _ => Ok(()),
    }
}

/// Commits a transaction, with faults.
pub(super) async fn commit(world: &World, life: &Life, transaction: MemoryTransaction) -> Result<(), StoreError> {
    let keys = transaction.staged().filter_map(|row| row.event.aggregate_id().map(str::to_owned)).collect();
    // A crashed process commits nothing.
    let _on_its_way = (!life.has_crashed()).then(|| world.start_committing(life.node, keys));
    let fault = on_the_way(world, life).await?;
    // The connection may be lost before the database gets the COMMIT.
    if fault == Fault::LoseAnswer && world.draw() < 0.5 {
        return Err(cut_off(FaultKind::OutcomeUnknown));
    }
    let rows: Vec<i64> = transaction.staged().map(|row| row.seq).collect();
    transaction.commit().await?;
    world.trace(life.node, || format!("commit {rows:?}"));
    world.ledger(|ledger| rows.into_iter().for_each(|seq| ledger.committed(seq)));
    if let Some(latency) = world.latency() {
        sleep(latency).await;
    }
    on_the_way_back(world, life, fault).await
}

impl FaultyStore {
    async fn before(&self) -> Result<Fault, StoreError> {
        on_the_way(&self.world, &self.life).await
    }

    async fn after(&self, before: Fault) -> Result<(), StoreError> {
        on_the_way_back(&self.world, &self.life, before).await
    }

    fn trace(&self, step: impl FnOnce() -> String) {
        self.world.trace(self.life.node, step);
    }

    /// Notes the claimed rows in the ledger at once, even if the answer is lost later.
    fn note_claims(&self, request: &ClaimRequest<'_>, claimed: &ClaimedRows) {
        let mode = self.world.mode;
        for row in &claimed.rows {
            let seq = row.position.seq;
            let before = self.world.database.look(TABLE, |table| table.unfinished_before(seq, mode));
            self.world.ledger(|ledger| match row.is_dead {
                true => ledger.went_dead(seq),
                false => ledger.claimed(seq, request.claim_id, before.unwrap_or_default()),
            });
        }
    }

    async fn sabotage(&self, request: &ClaimRequest<'_>, claimed: &mut ClaimedRows) -> Result<(), StoreError> {
        let has_live = claimed.rows.first().is_some_and(|row| !row.is_dead);
        if has_live && self.world.mode.leases_rows() && self.world.sabotage_now(Sabotage::ClaimOneTwice) {
            let again = copy(&claimed.rows[0]);
            claimed.rows.push(again);
        }
        if has_live && self.world.sabotage_now(Sabotage::LoseOne) {
            let lost = claimed.rows.remove(0).position.seq;
            let change = RowUpdate { seq: lost, status: OutboxStatus::Done, attempts: None, wait: None, error: None };
            let token = match self.world.mode.leases_rows() {
                true => Some(request.claim_id.to_owned()),
                false => self.world.database.look(TABLE, |table| table.fencing_token()).flatten(),
            };
            let fencing_tokens: Vec<String> = token.into_iter().collect();
            self.store.settle(&fencing_tokens, std::slice::from_ref(&change)).await?;
            self.world.ledger(|ledger| ledger.settled(self.world.mode, &fencing_tokens, &change));
        }
        if self.world.sabotage == Sabotage::ForgetOrder {
            claimed.rows.iter_mut().for_each(|row| row.key = None);
        }
        Ok(())
    }

    /// The fencing tokens that the store accepts at this moment.
    fn forged(&self, changes: &[RowUpdate]) -> Vec<String> {
        let forged = self.world.database.look(TABLE, |table| match self.world.mode.leases_rows() {
            true => changes.iter().filter_map(|change| table.row(change.seq)?.locked_by.clone()).collect(),
            false => table.fencing_token().into_iter().collect(),
        });
        forged.unwrap_or_default()
    }
}

fn copy(row: &ClaimedRow) -> ClaimedRow {
    ClaimedRow {
        position: row.position,
        created_at: row.created_at,
        event: row.event.clone(),
        is_dead: row.is_dead,
        is_suspect: row.is_suspect,
        key: row.key.clone(),
    }
}

impl Store for FaultyStore {
    fn notifier(&self) -> Option<&dyn Notifier> {
        Some(self)
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
impl OwnershipStore for FaultyStore {
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError> {
        self.store.register(reader, lease).await
    }

    async fn registered(&self) -> Result<Option<Registration>, StoreError> {
        self.store.registered().await
    }

    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError> {
        let fault = self.before().await?;
        let mut owned = self.store.acquire_ownership(owner, lease).await?;
        self.trace(|| format!("own {owner}: {owned:?}"));
        match owned {
            Owner::Us { generation } => self.world.ledger(|ledger| ledger.owned(self.life.node, owner, generation)),
            Owner::Other { .. } if self.world.sabotage == Sabotage::IgnoreFence => owned = Owner::Us { generation: 1 },
            Owner::Other { .. } => {}
        }
        self.after(fault).await?;
        Ok(owned)
    }

    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError> {
        let fault = self.before().await?;
        self.store.release_ownership(owner).await?;
        self.after(fault).await
    }
}

#[async_trait]
impl WriteStore for FaultyStore {
    type Connection = MemoryConnection;
    type Transaction = MemoryTransaction;

    fn is_cancel_safe(&self) -> bool {
        self.store.is_cancel_safe()
    }

    async fn begin(&self) -> Result<MemoryTransaction, StoreError> {
        let fault = self.before().await?;
        let transaction = self.store.begin().await?;
        self.after(fault).await?;
        Ok(transaction)
    }

    async fn commit(&self, transaction: MemoryTransaction) -> Result<(), StoreError> {
        commit(&self.world, &self.life, transaction).await
    }

    async fn rollback(&self, transaction: MemoryTransaction) -> Result<(), StoreError> {
        let fault = self.before().await?;
        match self.world.sabotage == Sabotage::CommitRollbacks {
            true => self.store.commit(transaction).await?,
            false => self.store.rollback(transaction).await?,
        }
        self.after(fault).await
    }

    async fn insert(
        &self,
        connection: &mut MemoryConnection,
        events: &[&Event],
        claim_id: Option<&str>,
    ) -> Result<Vec<i64>, StoreError> {
        let fault = self.before().await?;
        let rows = self.store.insert(connection, events, claim_id).await?;
        self.trace(|| format!("insert {rows:?} with {claim_id:?}"));
        self.world.ledger(|ledger| {
            for (seq, event) in rows.iter().zip(events) {
                ledger.inserted(*seq, event.id(), event.aggregate_id(), claim_id);
            }
            claim_id.into_iter().for_each(|claim_id| ledger.note_claim_prefix(self.life.node, claim_id));
        });
        self.after(fault).await?;
        Ok(rows)
    }

    async fn surviving(&self, connection: &mut MemoryConnection, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        let fault = self.before().await?;
        let surviving = self.store.surviving(connection, rows).await?;
        self.after(fault).await?;
        Ok(surviving)
    }
}

#[async_trait]
impl ClaimStore for FaultyStore {
    async fn claim(&self, request: &ClaimRequest<'_>) -> Result<ClaimedRows, StoreError> {
        let fault = self.before().await?;
        let mut claimed = self.store.claim(request).await?;
        self.world.ledger(|ledger| ledger.note_claim_prefix(self.life.node, request.claim_id));
        self.note_claims(request, &claimed);
        self.trace(|| {
            let rows: Vec<_> = claimed.rows.iter().map(|row| (row.position.seq, row.is_suspect)).collect();
            format!("claim {} without {:?}: {rows:?} more: {}", request.claim_id, request.in_flight, claimed.more)
        });
        self.after(fault).await?;
        if self.world.claim_is_lost() {
            return Err(cut_off(FaultKind::OutcomeUnknown));
        }
        self.sabotage(request, &mut claimed).await?;
        Ok(claimed)
    }

    async fn next_due(&self, request: &ClaimRequest<'_>) -> Result<Option<Duration>, StoreError> {
        let fault = self.before().await?;
        let due = self.store.next_due(request).await?;
        self.after(fault).await?;
        Ok(due)
    }

    async fn blocked_rows(&self, after: Option<Position>, limit: usize) -> Result<BlockedRows, StoreError> {
        self.store.blocked_rows(after, limit).await
    }

    async fn unlocked_unfinished(&self, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        self.store.unlocked_unfinished(rows).await
    }

    async fn unblock_rows(&self, rows: &[i64]) -> Result<(), StoreError> {
        self.store.unblock_rows(rows).await
    }

    async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        self.store.pending_types().await
    }
}

#[async_trait]
impl SettleStore for FaultyStore {
    async fn settle(&self, fencing_tokens: &[String], changes: &[RowUpdate]) -> Result<SettledRows, StoreError> {
        let fault = self.before().await?;
        let settled = match self.world.sabotage {
            Sabotage::IgnoreFence => self.store.settle(&self.forged(changes), changes).await?,
            _ => self.store.settle(fencing_tokens, changes).await?,
        };
        self.trace(|| format!("settle {fencing_tokens:?} {changes:?}: {settled:?}"));
        for change in changes.iter().filter(|change| settled.applied.contains(&change.seq)) {
            self.world.ledger(|ledger| ledger.settled(self.world.mode, fencing_tokens, change));
        }
        self.after(fault).await?;
        Ok(settled)
    }
}

#[async_trait]
impl LeaseStore for FaultyStore {
    async fn renew(&self, claim_ids: &[String], rows: &[i64]) -> Result<SettledRows, StoreError> {
        let fault = self.before().await?;
        if self.world.renewal_fails() {
            return Err(cut_off(FaultKind::Transient));
        }
        let mut renewed = self.store.renew(claim_ids, rows).await?;
        if self.world.sabotage == Sabotage::IgnoreFence {
            renewed.applied.extend(rows);
        }
        self.trace(|| format!("renew {claim_ids:?} {rows:?}: {renewed:?}"));
        self.after(fault).await?;
        Ok(renewed)
    }

    async fn release(&self, leases: &LeaseSet<'_>) -> Result<SettledRows, StoreError> {
        let fault = self.before().await?;
        let released = self.store.release(leases).await?;
        self.trace(|| format!("release {leases:?}: {released:?}"));
        self.after(fault).await?;
        Ok(released)
    }

    async fn mark_started(&self, claim_id: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, StoreError> {
        let fault = self.before().await?;
        let marked = self.store.mark_started(claim_id, started, rows).await?;
        self.trace(|| format!("start suspects {started}: {marked:?}"));
        self.world.ledger(|ledger| marked.iter().for_each(|seq| ledger.started(*seq, started)));
        self.after(fault).await?;
        Ok(marked)
    }
}

#[async_trait]
impl Notifier for FaultyStore {
    async fn notify(&self) -> Result<(), StoreError> {
        let fault = self.before().await?;
        self.store.notify().await?;
        self.after(fault).await
    }

    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError> {
        self.before().await?;
        self.store.listen(wakeup).await
    }
}

#[async_trait]
impl OperatorStore for FaultyStore {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        self.store.find(event_id).await
    }

    async fn dead(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError> {
        self.store.dead(filter, limit).await
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        self.store.count_dead(filter).await
    }

    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError> {
        self.store.count_pending(limit).await
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<(u64, i64), StoreError> {
        self.store.replay(filter, after, limit).await
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        self.store.discard(event_id).await
    }

    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        let fault = self.before().await?;
        let purged = self.store.purge(purge, older_than, limit).await?;
        self.after(fault).await?;
        Ok(purged)
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        self.store.oldest_due().await
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        self.store.oldest_unblocked().await
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        self.store.oldest_due_by_type().await
    }
}

use std::time::Duration;

use posthaste::{Event, Failure, Mode, Pool, TableName};
use posthaste_core::outbox::{OutboxItem, OutboxSource, Owner, Reader, RowUpdate, Store, Table};
use posthaste_core::{Claim, Claimed, Disposition, Settled, Settlement, Source};
use tokio::time::Instant;

use super::{Harness, LEASE, PATIENCE};

/// The modes in which a dispatcher reads.
pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];
/// The modes in which channels read.
pub const CHANNEL_MODES: [Mode; 2] = [Mode::SingleNode, Mode::MultiNode];

/// One process's part in a table: it knows nothing of its siblings but what the database says.
pub async fn table_of<H: Harness>(db: &H, reader: Reader, mode: Mode, lease: Duration) -> Table<H::Store> {
    let store = db.pool().await.open(TableName::default(), mode).await.unwrap();
    Table::open(store, reader, lease).await.unwrap()
}

pub async fn dispatcher<H: Harness>(db: &H, mode: Mode) -> Table<H::Store> {
    table_of(db, Reader::Dispatcher, mode, LEASE).await
}

pub async fn channels<H: Harness>(db: &H, mode: Mode) -> Table<H::Store> {
    table_of(db, Reader::Channels, mode, LEASE).await
}

/// A node that claims by hand.
pub async fn node<H: Harness>(db: &H, mode: Mode) -> OutboxSource<H::Store> {
    dispatcher(db, mode).await.dispatcher_source()
}

/// Writes events in a transaction whose end the table cannot see; answers with the numbers of their rows.
pub async fn insert<S: Store>(table: &Table<S>, transaction: &mut S::Transaction, events: &[Event]) -> Vec<i64> {
    let all: Vec<&Event> = events.iter().collect();
    let rows = table.store().insert(transaction, &all, None).await.unwrap();
    table.wrote(events);
    rows
}

/// The same, in a transaction of their own.
pub async fn write_to<S: Store>(table: &Table<S>, events: &[Event]) -> Vec<i64> {
    let mut transaction = table.store().begin().await.unwrap();
    let rows = insert(table, &mut transaction, events).await;
    table.store().commit(transaction).await.unwrap();
    rows
}

/// What a node claims now.
pub async fn claim<S: Store>(node: &OutboxSource<S>, limit: usize) -> Vec<Claimed<OutboxItem>> {
    node.claim(limit).await.unwrap().items
}

/// What a node claims as soon as there is something: a claim passes over what a statement of another node has locked at
/// that moment.
pub async fn claim_soon<S: Store>(node: &OutboxSource<S>, limit: usize) -> Vec<Claimed<OutboxItem>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let claimed = claim(node, limit).await;
        if !claimed.is_empty() {
            return claimed;
        }
        assert!(Instant::now() < deadline, "nothing became claimable in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn claimed_ids(items: &[Claimed<OutboxItem>]) -> Vec<String> {
    items.iter().map(|claimed| claimed.item.event.id().to_owned()).collect()
}

/// Whether a claim found nothing, and nothing that will soon be due.
pub fn is_idle(claim: &Claim<OutboxItem>) -> bool {
    claim.items.is_empty() && claim.next_due.is_none_or(|wait| wait > LEASE / 4)
}

pub async fn settle<S: Store>(
    node: &OutboxSource<S>,
    claimed: &Claimed<OutboxItem>,
    disposition: Disposition,
) -> Settled {
    settle_all(node, &[(claimed, disposition)]).await[0]
}

/// Several of them at once.
pub async fn settle_all<S: Store>(
    node: &OutboxSource<S>,
    settled: &[(&Claimed<OutboxItem>, Disposition)],
) -> Vec<Settled> {
    let settlement = |(claimed, disposition)| Settlement { claimed, disposition, took: Duration::ZERO };
    let settlements: Vec<_> =
        settled.iter().map(|(claimed, disposition)| settlement((*claimed, disposition))).collect();
    node.settle(&settlements).await.unwrap()
}

pub fn failure() -> Failure {
    Failure::transient("503", "down")
}

/// A failed attempt that counts.
pub fn retry(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: true, failure: Some(failure()) }
}

pub fn snooze(after: Duration) -> Disposition {
    Disposition::Retry { after, counted: false, failure: None }
}

/// A store that can be told to record anything about any row, as its single owner.
pub struct Marks<S> {
    pub store: S,
    fence: String,
}

impl<S: Store> Marks<S> {
    pub async fn of<H: Harness<Store = S>>(db: &H) -> Self {
        let store = db.pool().await.open(TableName::default(), Mode::SingleNode).await.unwrap();
        store.register(Reader::Dispatcher, LEASE).await.unwrap();
        let Owner::Us { generation } = store.acquire_ownership("me", LEASE).await.unwrap() else {
            panic!("nobody else is there")
        };
        Self { store, fence: format!("me:{generation}") }
    }

    pub async fn mark(&self, seq: i64, disposition: &Disposition) -> bool {
        let changes = [RowUpdate::of(seq, 1, disposition)];
        self.store.settle(std::slice::from_ref(&self.fence), &changes).await.unwrap().applied.contains(&seq)
    }
}

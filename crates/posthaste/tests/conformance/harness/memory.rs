use async_trait::async_trait;
use posthaste_testing::{MemoryDatabase, MemoryOutbox, MemoryTransaction};

use super::{Harness, Tamper};

pub struct Memory(pub MemoryDatabase);

#[async_trait]
impl Harness for Memory {
    type Store = MemoryOutbox;
    type Pool = MemoryDatabase;
    type Plain = MemoryTransaction;

    async fn start() -> Self {
        Self(MemoryDatabase::new())
    }

    async fn pool(&self) -> MemoryDatabase {
        self.0.clone()
    }

    async fn begin_plain(pool: &MemoryDatabase) -> MemoryTransaction {
        pool.begin().await.unwrap()
    }

    async fn commit_plain(transaction: MemoryTransaction) {
        transaction.commit().await.unwrap();
    }

    fn in_use(_: &MemoryDatabase) -> usize {
        0
    }

    async fn tamper(&self, tamper: Tamper<'_>) {
        match tamper {
            Tamper::BreakHeaders { event_id } => self.0.break_headers("outbox_event", event_id),
            Tamper::SetClockBack { by } => self.0.set_clock_back("outbox_event", by),
            Tamper::Age { event_id, by } => self.0.age("outbox_event", event_id, by),
        }
    }
}

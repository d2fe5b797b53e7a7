use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::outbox::{DeadFilter, DeadHead, Mode, OperatorStore, OutboxRow, OutboxStatus, Purge, Store};

use super::table::{MemoryTable, Row};
use super::{MemoryOutbox, in_micros};

#[async_trait]
impl OperatorStore for MemoryOutbox {
    async fn find(&self, event_id: &str) -> Result<Option<OutboxRow>, StoreError> {
        let (mut state, _) = self.statement("look into")?;
        Ok(state.table(&self.table).row_of(event_id).map(Row::as_seen))
    }

    async fn dead(&self, filter: &DeadFilter, limit: usize) -> Result<Vec<OutboxRow>, StoreError> {
        let (mut state, _) = self.statement("list dead events of")?;
        Ok(dead(state.table(&self.table), filter).take(limit).map(Row::as_seen).collect())
    }

    async fn count_dead(&self, filter: &DeadFilter) -> Result<u64, StoreError> {
        let (mut state, _) = self.statement("count dead events of")?;
        Ok(dead(state.table(&self.table), filter).count() as u64)
    }

    async fn count_pending(&self, limit: usize) -> Result<u64, StoreError> {
        let (mut state, _) = self.statement("count pending events of")?;
        let is_pending = |row: &&Row| matches!(row.status, OutboxStatus::New | OutboxStatus::Retry);
        Ok(state.table(&self.table).rows().filter(is_pending).take(limit).count() as u64)
    }

    async fn replay(&self, filter: &DeadFilter, after: i64, limit: usize) -> Result<(u64, i64), StoreError> {
        let (mut state, now) = self.statement("replay dead events of")?;
        let table = state.table(&self.table);
        let chosen = dead(table, filter).map(|row| row.seq).filter(|seq| *seq > after);
        let chosen: Vec<i64> = chosen.take(limit).collect();
        for seq in &chosen {
            table.change(*seq, |row| row.replay(now));
        }
        Ok((chosen.len() as u64, chosen.last().copied().unwrap_or(after)))
    }

    async fn discard(&self, event_id: &str) -> Result<bool, StoreError> {
        let (mut state, _) = self.statement("discard a dead event of")?;
        let table = state.table(&self.table);
        let found = table.row_of(event_id).filter(|row| row.status == OutboxStatus::Dead).map(|row| row.seq);
        Ok(found.and_then(|seq| table.remove(seq)).is_some())
    }

    async fn purge(&self, purge: Purge, older_than: Duration, limit: usize) -> Result<u64, StoreError> {
        let (mut state, now) = self.statement("purge")?;
        let before = now - in_micros(older_than);
        let table = state.table(&self.table);
        let finished = |row: &Row, status| row.status == status && row.done_at.unwrap_or(row.created_at) <= before;
        let is_old = |row: &&Row| match purge {
            Purge::Done => finished(row, OutboxStatus::Done),
            Purge::Dead => finished(row, OutboxStatus::Dead),
            Purge::Everything => row.created_at <= before,
        };
        let old: Vec<i64> = table.rows().filter(is_old).map(|row| row.seq).take(limit).collect();
        for seq in &old {
            table.remove(*seq);
        }
        Ok(old.len() as u64)
    }

    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError> {
        let (mut state, now) = self.statement("look for the oldest event of")?;
        let oldest = state.table(&self.table).pending.first().filter(|at| at.due <= now);
        Ok(oldest.map(|at| Duration::from_micros((now - at.due) as u64)))
    }

    async fn oldest_unblocked(&self) -> Result<Option<Duration>, StoreError> {
        let (mut state, now) = self.statement("look for the oldest event of")?;
        let table = state.table(&self.table);
        let skips_dead = self.mode() == Mode::Ordered(DeadHead::Skip);
        let is_unfinished = |row: &Row| !skips_dead || row.status != OutboxStatus::Dead;
        let is_unblocked = |row: &&Row| {
            let of_key = row.key.as_ref().and_then(|key| table.by_key.get(key));
            let mut before = of_key.into_iter().flatten().take_while(|seq| **seq < row.seq);
            !before.any(|seq| table.row(*seq).is_some_and(is_unfinished))
        };
        let due = table.pending.iter().take_while(|at| at.due <= now).filter_map(|at| table.row(at.seq));
        Ok(due.filter(is_unblocked).map(|row| Duration::from_micros((now - row.available_at) as u64)).next())
    }

    async fn oldest_due_by_type(&self) -> Result<Vec<(String, Duration)>, StoreError> {
        let (mut state, now) = self.statement("look for the oldest events of")?;
        Ok(state.table(&self.table).oldest_due_by_type(now))
    }
}

fn dead<'a>(table: &'a MemoryTable, filter: &'a DeadFilter) -> impl Iterator<Item = &'a Row> {
    let matches = |asked: &Option<String>, found: &str| asked.as_deref().is_none_or(|asked| asked == found);
    table.rows().filter(move |row| {
        row.status == OutboxStatus::Dead
            && matches(&filter.event_id, row.event.id())
            && matches(&filter.event_type, row.event.event_type())
            && matches(&filter.aggregate_type, row.event.aggregate_type())
    })
}

impl Row {
    fn replay(&mut self, now: i64) {
        self.status = OutboxStatus::New;
        self.attempts = 0;
        self.available_at = now;
        self.done_at = None;
        self.last_error = None;
        self.locked_by = None;
        self.lease_losses = 0;
    }
}

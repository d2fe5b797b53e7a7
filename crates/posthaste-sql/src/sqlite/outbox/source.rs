use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::TryStreamExt;
use futures_util::stream::BoxStream;
use posthaste_core::{Claim, Claimed, Failure, Settled, Settlement, Source, StoreError, Wakeup};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row};

use super::Outbox;
use super::lane::Lane;
use super::ownership::Owner;
use super::rows::Pending;
use super::settling::Records;
use crate::outbox::{MAX_CLAIM_BYTES, OutboxItem};
use crate::sqlite::clock::span;
use crate::sqlite::database::store_error;

/// The pending events of one outbox, or of one event type in it.
pub struct OutboxSource {
    outbox: Outbox,
    lane: Arc<Lane>,
    closed: AtomicBool,
}

impl OutboxSource {
    pub(super) fn new(outbox: Outbox, lane: Arc<Lane>) -> Self {
        Self { outbox, lane, closed: AtomicBool::new(false) }
    }

    fn fetch<'a>(
        &'a self,
        sql: &'a str,
        left_out: &[i64],
        limit: usize,
    ) -> Result<BoxStream<'a, Result<SqliteRow, sqlx::Error>>, sqlx::Error> {
        let left_out = serde_json::to_string(left_out).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut query = sqlx::query(AssertSqlSafe(sql)).bind(left_out).bind(limit);
        if let Some(event_type) = &self.lane.event_type {
            query = query.bind(event_type);
        }
        Ok(query.fetch(self.outbox.0.database.readers()))
    }

    /// Reads what is due; true when bytes and not rows were the limit, so that there may be more.
    async fn pending(&self, left_out: &[i64], limit: usize) -> Result<(Vec<Pending>, bool), sqlx::Error> {
        let mut rows = self.fetch(&self.lane.pending, left_out, limit)?;
        let (mut read, mut bytes) = (Vec::new(), 0);
        while let Some(row) = rows.try_next().await? {
            let pending = Pending::read(&row)?;
            bytes += pending.payload_bytes;
            read.push(pending);
            if bytes >= MAX_CLAIM_BYTES {
                return Ok((read, true));
            }
        }
        Ok((read, false))
    }

    /// How long until something is due that is not left out. A hint, not worth failing for.
    async fn next_due(&self, left_out: &[i64]) -> Option<Duration> {
        let row = self.fetch(&self.lane.next_due, left_out, 1).ok()?.try_next().await.ok()??;
        row.try_get(0).ok().map(span)
    }

    /// Rows that are no events go dead, so that nobody reads them again; it is no reason to stop when that fails.
    async fn bury(&self, generation: i64, undecodable: Vec<(i64, String)>) {
        let mut records = Records::default();
        for (seq, reason) in undecodable {
            tracing::error!(table = %self.outbox.0.table, seq, reason, "outbox row cannot be read as an event");
            records.dead(seq, generation, &Failure::permanent("undecodable", reason));
        }
        if let Err(error) = self.outbox.record(records).await {
            tracing::warn!(error = error.chain(), "undecodable outbox rows are left for the next claim");
        }
    }

    /// Whether this call is the one that ends the source, and whether it was the last of its outbox.
    fn leave(&self) -> bool {
        let ended_before = self.closed.swap(true, Ordering::AcqRel);
        !ended_before && self.outbox.0.open_sources.fetch_sub(1, Ordering::AcqRel) == 1
    }
}

#[async_trait]
impl Source for OutboxSource {
    type Item = OutboxItem;

    async fn claim(&self, limit: usize) -> Result<Claim<OutboxItem>, StoreError> {
        let outbox = &*self.outbox.0;
        let _one_at_a_time = self.lane.claiming.lock().await;
        let started = Instant::now();
        let generation = match outbox.ownership.hold(&outbox.database).await? {
            Owner::Us { generation } => generation,
            Owner::Other { remaining } => return Ok(Claim { items: Vec::new(), next_due: Some(remaining) }),
        };
        let failed = |error| store_error("claim from the outbox", error);
        let until = started + self.lease();
        let mut left_out = self.lane.holdings.still_held(generation, started);
        let (pending, cut) = self.pending(&left_out, limit).await.map_err(failed)?;
        let ticket = self.lane.holdings.next_ticket();
        let (mut items, mut undecodable) = (Vec::with_capacity(pending.len()), Vec::new());
        for Pending { seq, created_at, event, .. } in pending {
            left_out.push(seq);
            match event {
                Ok((attempts, event)) => {
                    self.lane.holdings.hold(seq, ticket, generation, until, None);
                    let bytes = event.weight();
                    let item = OutboxItem { seq, generation, created_at, event: Arc::new(event), ticket };
                    items.push(Claimed::new(item, attempts.saturating_add(1), bytes));
                }
                Err(reason) => undecodable.push((seq, reason)),
            }
        }
        if !undecodable.is_empty() {
            self.bury(generation, undecodable).await;
        }
        let next_due = match items.len() < limit {
            // Fewer than asked for, but there may be more: whoever asked is to come again at once.
            true if cut => Some(Duration::ZERO),
            true => self.next_due(&left_out).await,
            false => None,
        };
        Ok(Claim { items, next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let settling = self.lane.holdings.settling(settlements.iter().map(|settlement| &settlement.claimed.item));
        let mut records = Records::default();
        let mut ours = settling.items().iter().peekable();
        // Ours are a part of the settlements, in the same order; the others are no longer held by their claim.
        let mut held = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let item = &settlement.claimed.item;
            let is_held = ours.next_if(|next| std::ptr::eq(**next, item)).is_some();
            held.push(is_held);
            if is_held {
                records.settle(item.seq, item.generation, settlement.disposition);
            }
        }
        let recorded = self.outbox.record(records).await?;
        settling.recorded();
        let answer = settlements.iter().zip(held).map(|(settlement, is_held)| {
            match is_held && recorded.contains(&settlement.claimed.item.seq) {
                true => Settled::Applied,
                false => Settled::LostLease,
            }
        });
        Ok(answer.collect())
    }

    async fn renew(&self, held: &[&Claimed<OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let outbox = &*self.outbox.0;
        let until = Instant::now() + self.lease();
        let owner = outbox.ownership.hold(&outbox.database).await?;
        let renewed = held.iter().map(|claimed| match owner {
            Owner::Us { generation } if self.lane.holdings.extend(&claimed.item, generation, until) => Settled::Applied,
            _ => Settled::LostLease,
        });
        Ok(renewed.collect())
    }

    async fn release(&self, held: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        for claimed in held {
            self.lane.holdings.let_go(&claimed.item);
        }
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.leave() {
            true => self.outbox.0.ownership.give_up(&self.outbox.0.database).await,
            false => Ok(()),
        }
    }

    fn lease(&self) -> Duration {
        self.outbox.0.ownership.dependable_lease()
    }

    fn wakeup(&self) -> &Wakeup {
        &self.lane.wakeup
    }
}

impl Drop for OutboxSource {
    /// A source that was dropped and not closed does not keep the others from being the last; its lease runs out.
    fn drop(&mut self) {
        self.leave();
    }
}

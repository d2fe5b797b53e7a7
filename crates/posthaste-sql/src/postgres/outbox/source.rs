use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_core::{Claim, Claimed, Failure, Settled, Settlement, Source, StoreError, Wakeup};
use sqlx::{AssertSqlSafe, PgConnection, Row};

use super::lane::{Lane, Position, Reading};
use super::ownership::Owner;
use super::rows::Pending;
use super::settling::Records;
use super::{Outbox, fill};
use crate::outbox::{MAX_CLAIM_BYTES, Mode, OutboxItem};
use crate::postgres::clock::{micros, span};
use crate::postgres::faults::store_error;

/// The pending events of one outbox, or of one event type in it.
pub struct OutboxSource {
    outbox: Outbox,
    lane: Arc<Lane>,
    closed: AtomicBool,
}

/// What a claim took.
struct Taken {
    /// In the order of delivery.
    rows: Vec<Pending>,
    /// See [`Claim::next_due`].
    next_due: Option<Duration>,
}

/// The leases of these rows, if they still stand, begin anew.
pub(super) const RENEW: &str = "UPDATE {table} SET locked_at = {now}
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

/// Another process need not wait for the end of these leases.
pub(super) const RELEASE: &str = "UPDATE {table} SET locked_by = NULL, locked_at = NULL
     WHERE seq = ANY ($2) AND status NOT IN (1, 3) AND locked_by = ANY ($1)
     RETURNING seq";

impl OutboxSource {
    pub(super) fn new(outbox: Outbox, lane: Arc<Lane>) -> Self {
        Self { outbox, lane, closed: AtomicBool::new(false) }
    }

    /// Takes what is due, and moves on to behind it.
    async fn take(
        &self,
        reading: &mut Reading,
        started: Instant,
        ticket: u64,
        mut left_out: Vec<i64>,
        with_suspects: bool,
        limit: usize,
    ) -> Result<Taken, sqlx::Error> {
        let mut scan = self.outbox.scan().await?;
        let mut from = self.lane.start(reading, started);
        let mut rows = self.take_behind(&mut scan, from, ticket, &left_out, with_suspects, limit).await?;
        if rows.is_empty() && !from.is_beginning() {
            reading.behind = None;
            from = self.lane.start(reading, started);
            rows = self.take_behind(&mut scan, from, ticket, &left_out, with_suspects, limit).await?;
        }
        let bytes: usize = rows.iter().map(|row| row.payload_bytes).sum();
        let is_full = rows.len() >= limit || bytes >= MAX_CLAIM_BYTES;
        let has_suspect = self.outbox.0.mode == Mode::MultiNode && rows.iter().any(|row| row.is_suspect);
        let next_due = match is_full || has_suspect || !from.is_beginning() {
            // There may be more: whoever asked for more is to come again at once.
            true => Some(Duration::ZERO),
            false => {
                left_out.extend(rows.iter().map(|row| row.position.seq));
                self.next_due(&mut scan, &left_out, with_suspects).await?
            }
        };
        scan.commit().await?;
        if !has_suspect {
            reading.behind = rows.last().filter(|_| is_full).map(|row| row.position);
        }
        Ok(Taken { rows, next_due })
    }

    async fn take_behind(
        &self,
        scan: &mut PgConnection,
        from: Position,
        ticket: u64,
        left_out: &[i64],
        with_suspects: bool,
        limit: usize,
    ) -> Result<Vec<Pending>, sqlx::Error> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let mut query = sqlx::query(AssertSqlSafe(self.lane.claim.as_str()))
            .bind(left_out)
            .bind(limit)
            .bind(from.available_at)
            .bind(from.seq);
        if self.outbox.0.mode == Mode::MultiNode {
            query = query.bind(self.lane.lock(ticket)).bind(micros(self.outbox.0.lease)).bind(with_suspects);
        }
        if let Some(event_type) = &self.lane.event_type {
            query = query.bind(event_type);
        }
        let rows = query.fetch_all(scan).await?;
        let mut rows = rows.iter().map(Pending::read).collect::<Result<Vec<_>, _>>()?;
        rows.sort_unstable_by_key(|row| (row.position.available_at, row.position.seq));
        Ok(rows)
    }

    /// How long until something is due that is not left out.
    async fn next_due(
        &self,
        scan: &mut PgConnection,
        left_out: &[i64],
        with_suspects: bool,
    ) -> Result<Option<Duration>, sqlx::Error> {
        let sql = AssertSqlSafe(self.lane.next_due.as_str());
        let mut query = sqlx::query(sql).bind(left_out).bind(with_suspects);
        if let Some(event_type) = &self.lane.event_type {
            query = query.bind(event_type);
        }
        let row = query.fetch_optional(scan).await?;
        row.map(|row| row.try_get(0).map(span)).transpose()
    }

    /// What must still stand for a row to be settled.
    fn fence(&self, ticket: u64, generation: i64) -> String {
        match self.outbox.0.mode {
            Mode::SingleNode => format!("{}:{generation}", self.outbox.0.ownership.owner()),
            Mode::MultiNode => self.lane.lock(ticket),
        }
    }

    /// Rows that are no events go dead, so that nobody reads them again; it is no reason to stop when that fails.
    async fn bury(&self, fence: String, undecodable: Vec<(i64, String)>) {
        let mut records = Records::default();
        for (seq, reason) in undecodable {
            tracing::error!(table = %self.outbox.0.table, seq, reason, "outbox row cannot be read as an event");
            records.dead(seq, fence.clone(), &Failure::permanent("undecodable", reason));
        }
        if let Err(error) = self.outbox.record(&self.lane, records).await {
            tracing::warn!(error = error.chain(), "undecodable outbox rows are left for a later claim");
        }
    }

    /// Runs a statement about the leases of items that this process holds, and answers which rows it changed.
    async fn update_leases(
        &self,
        doing: &'static str,
        sql: &str,
        items: &[&OutboxItem],
    ) -> Result<HashSet<i64>, StoreError> {
        if items.is_empty() {
            return Ok(HashSet::new());
        }
        let failed = |error| store_error(doing, error);
        let locks: BTreeSet<u64> = items.iter().map(|item| item.ticket).collect();
        let locks: Vec<String> = locks.into_iter().map(|ticket| self.lane.lock(ticket)).collect();
        let mut seqs: Vec<i64> = items.iter().map(|item| item.seq).collect();
        seqs.sort_unstable();
        let query = sqlx::query(AssertSqlSafe(fill(sql, &self.outbox.0.table))).bind(locks).bind(seqs);
        let _one_at_a_time = self.lane.recording.lock().await;
        let rows = query.fetch_all(&self.outbox.0.pool).await.map_err(failed)?;
        rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(failed)
    }

    fn let_go(&self, items: &[&OutboxItem]) {
        let mut suspect_is_gone = false;
        for item in items {
            suspect_is_gone |= self.lane.holdings.let_go(item);
        }
        if suspect_is_gone {
            self.outbox.suspect_is_gone();
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
        let (outbox, lane) = (&*self.outbox.0, &*self.lane);
        let mut reading = lane.claiming.lock().await;
        let started = Instant::now();
        let generation = match outbox.mode {
            Mode::MultiNode => 0,
            Mode::SingleNode => match outbox.ownership.hold(&outbox.pool).await? {
                Owner::Us { generation } => generation,
                Owner::Other { remaining } => return Ok(Claim { items: Vec::new(), next_due: Some(remaining) }),
            },
        };
        let left_out = lane.holdings.still_held(generation, started);
        let ticket = lane.holdings.next_ticket();
        let mut permit = match outbox.mode {
            Mode::SingleNode => None,
            Mode::MultiNode => outbox.suspects.clone().try_acquire_owned().ok(),
        };
        let with_suspects = outbox.mode == Mode::SingleNode || permit.is_some();
        let taken = self.take(&mut reading, started, ticket, left_out, with_suspects, limit).await;
        let Taken { rows, next_due } = taken.map_err(|error| store_error("claim from the outbox", error))?;
        let until = started + self.lease();
        let (mut items, mut undecodable) = (Vec::with_capacity(rows.len()), Vec::new());
        for Pending { position: Position { seq, .. }, created_at, event, is_dead, is_suspect, .. } in rows {
            if is_dead {
                tracing::error!(table = %outbox.table, seq, "outbox row is dead: nobody who claimed it settled it");
                continue;
            }
            match event {
                Ok((attempts, event)) => {
                    let permit = if is_suspect { permit.take() } else { None };
                    lane.holdings.hold(seq, ticket, generation, until, permit);
                    let bytes = event.weight();
                    let item = OutboxItem { seq, generation, created_at, event: Arc::new(event), ticket };
                    items.push(Claimed::new(item, attempts.saturating_add(1), bytes));
                }
                Err(reason) => undecodable.push((seq, reason)),
            }
        }
        if !undecodable.is_empty() {
            self.bury(self.fence(ticket, generation), undecodable).await;
        }
        let next_due = next_due.filter(|_| items.len() < limit);
        Ok(Claim { items, next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let settling = self.lane.holdings.settling(settlements.iter().map(|settlement| &settlement.claimed.item));
        // What was claimed under an earlier ownership is lost: another process had the table in between.
        let generation = settling.items().iter().map(|item| item.generation).max();
        let mut records = Records::default();
        let mut ours = settling.items().iter().peekable();
        let mut held = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let item = &settlement.claimed.item;
            let is_ours = ours.next_if(|next| std::ptr::eq(**next, item)).is_some();
            let is_held = is_ours && Some(item.generation) == generation;
            held.push(is_held);
            if is_held {
                records.settle(item.seq, self.fence(item.ticket, item.generation), settlement.disposition);
            }
        }
        let recorded = self.outbox.record(&self.lane, records).await?;
        if settling.recorded() {
            self.outbox.suspect_is_gone();
        }
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
        let owner = match outbox.mode {
            Mode::SingleNode => outbox.ownership.hold(&outbox.pool).await?,
            Mode::MultiNode => Owner::Us { generation: 0 },
        };
        let mut renewed = Vec::with_capacity(held.len());
        for claimed in held {
            renewed.push(match owner {
                Owner::Us { generation } => self.lane.holdings.extend(&claimed.item, generation, until),
                Owner::Other { .. } => false,
            });
        }
        if outbox.mode == Mode::MultiNode {
            let extended = held.iter().zip(&renewed).filter(|(_, extended)| **extended);
            let extended: Vec<&OutboxItem> = extended.map(|(claimed, _)| &claimed.item).collect();
            let stand = self.update_leases("renew leases in the outbox", RENEW, &extended).await?;
            for (claimed, renewed) in held.iter().zip(&mut renewed).filter(|(_, renewed)| **renewed) {
                *renewed = stand.contains(&claimed.item.seq);
                if !*renewed {
                    self.let_go(&[&claimed.item]);
                }
            }
        }
        let answer = |renewed| if renewed { Settled::Applied } else { Settled::LostLease };
        Ok(renewed.into_iter().map(answer).collect())
    }

    async fn release(&self, held: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        let items = held.iter().map(|claimed| &claimed.item).filter(|item| self.lane.holdings.has(item));
        let items: Vec<&OutboxItem> = items.collect();
        if self.outbox.0.mode == Mode::MultiNode {
            self.update_leases("release leases in the outbox", RELEASE, &items).await?;
        }
        self.let_go(&items);
        self.lane.look_from_the_beginning();
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.leave() && self.outbox.0.mode == Mode::SingleNode {
            true => self.outbox.0.ownership.give_up(&self.outbox.0.pool).await,
            false => Ok(()),
        }
    }

    fn lease(&self) -> Duration {
        match self.outbox.0.mode {
            Mode::SingleNode => self.outbox.0.ownership.dependable_lease(),
            Mode::MultiNode => self.outbox.0.lease,
        }
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

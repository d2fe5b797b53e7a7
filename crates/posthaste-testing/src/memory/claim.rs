use std::collections::{BTreeSet, HashSet};
use std::ops::Bound;
use std::time::Duration;

use posthaste_core::Event;
use posthaste_core::outbox::{
    Candidate, ClaimRequest, ClaimedRow, ClaimedRows, DeadHead, Mode, OutboxStatus, Position, Selection, select,
};

use super::table::{MemoryTable, Row};
use super::{date, in_micros};

/// In microseconds, how soon a lease is looked at again that seems to have ended.
const SOONEST_TAKEOVER: i64 = 100_000;

/// One claim's view of a table.
pub(super) struct View<'a> {
    mode: Mode,
    request: &'a ClaimRequest<'a>,
    in_flight: HashSet<i64>,
    now: i64,
}

impl<'a> View<'a> {
    pub(super) fn new(mode: Mode, request: &'a ClaimRequest<'a>, now: i64) -> Self {
        Self { mode, request, in_flight: request.in_flight.iter().copied().collect(), now }
    }

    /// True if this claim could take the row once it is due.
    fn is_free(&self, row: &Row) -> bool {
        let lease = in_micros(self.request.lease);
        let is_believed = row.locked_at <= self.now + lease / 10;
        let is_leased = row.locked_by.is_some() && is_believed && self.now < row.locked_at + lease;
        row.is_pending()
            && !is_leased
            && self.request.event_type.is_none_or(|event_type| event_type == row.event.event_type())
            && (self.request.allow_suspects || !self.is_suspect(row))
            && !self.in_flight.contains(&row.seq)
    }

    fn is_due(&self, row: &Row) -> bool {
        row.available_at <= self.now && row.created_at <= self.now - in_micros(self.request.skip_recent)
    }

    /// Of a row that is not leased now: true if it lost a lease.
    fn is_suspect(&self, row: &Row) -> bool {
        self.mode.leases_rows() && (row.lease_losses > 0 || row.locked_by.is_some())
    }

    /// The unfinished rows of a key.
    fn unfinished<'t>(&self, table: &'t MemoryTable, of_key: &'t BTreeSet<i64>) -> impl Iterator<Item = &'t Row> {
        let skips_dead = self.mode == Mode::Ordered(DeadHead::Skip);
        let rows = of_key.iter().filter_map(|seq| table.row(*seq));
        rows.filter(move |row| !skips_dead || row.status != OutboxStatus::Dead)
    }

    fn candidate(&self, row: &Row, position: Position, predecessor: Option<i64>) -> Candidate {
        let leases_rows = self.mode.leases_rows();
        Candidate {
            position,
            key: row.key.clone().filter(|_| matches!(self.mode, Mode::Ordered(_))),
            predecessor,
            ended_lease: row.locked_by.clone().filter(|_| leases_rows),
            lease_losses: if leases_rows { row.lease_losses } else { 0 },
            bytes: row.event.weight(),
        }
    }
}

impl MemoryTable {
    pub(super) fn claim(&mut self, view: &View<'_>) -> ClaimedRows {
        let mut candidates = match view.mode {
            Mode::Ordered(_) => self.candidates_by_key(view),
            _ => self.candidates(view),
        };
        let is_full = candidates.len() > view.request.limit;
        candidates.truncate(view.request.limit);
        let last = candidates.last().map(|last| last.position);
        let Selection { claimed, losses, dead, is_cut, .. } = select(&candidates);
        let last = match (matches!(view.mode, Mode::Ordered(_)), claimed.last()) {
            // What was cut off is behind the last claimed row.
            (false, Some(seq)) => candidates.iter().map(|row| row.position).find(|position| position.seq == *seq),
            _ => last,
        };
        let rows = match dead {
            Some((seq, error)) => self.mark_dead(seq, losses, error, view).into_iter().collect(),
            None => claimed.into_iter().filter_map(|seq| self.lease(seq, losses, view)).collect(),
        };
        ClaimedRows { rows, more: is_full || is_cut, last, blocked: Vec::new() }
    }

    fn candidates(&self, view: &View<'_>) -> Vec<Candidate> {
        let after = view.request.after.map_or(Bound::Unbounded, Bound::Excluded);
        let due = self.pending.range((after, Bound::Unbounded)).take_while(|at| at.due <= view.now);
        let rows = due.filter_map(|at| self.row(at.seq)).filter(|row| view.is_free(row) && view.is_due(row));
        rows.take(view.request.limit + 1).map(|row| view.candidate(row, row.position(), None)).collect()
    }

    /// The rows that a claim by key may take, the rows of a key from its head on. A row that waits behind others is never a
    /// candidate, which has the same effect as marking it as blocked.
    fn candidates_by_key(&self, view: &View<'_>) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for row in self.pending.iter().take_while(|at| at.due <= view.now).filter_map(|at| self.row(at.seq)) {
            if row.key.is_none() && view.is_free(row) && view.is_due(row) {
                candidates.push(view.candidate(row, row.position(), None));
            }
        }
        for of_key in self.by_key.values() {
            let (mut due, mut predecessor) = (i64::MIN, None);
            for row in view.unfinished(self, of_key).take_while(|row| view.is_free(row) && view.is_due(row)) {
                // A row that waits for another is not due before that one is.
                due = due.max(row.available_at);
                candidates.push(view.candidate(row, Position { due, seq: row.seq }, predecessor));
                predecessor = Some(row.seq);
            }
        }
        candidates.retain(|row| view.request.after.is_none_or(|after| row.position > after));
        candidates.sort_unstable_by_key(|row| row.position);
        candidates
    }

    /// Leases a row where rows are leased, and reads it.
    fn lease(&mut self, seq: i64, losses: u32, view: &View<'_>) -> Option<ClaimedRow> {
        if view.mode.leases_rows() {
            self.change(seq, |row| {
                row.lease_losses = losses;
                row.locked_by = Some(view.request.claim_id.to_owned());
                row.locked_at = view.now;
            });
        }
        self.read(seq, losses, view)
    }

    fn mark_dead(&mut self, seq: i64, losses: u32, error: String, view: &View<'_>) -> Option<ClaimedRow> {
        self.change(seq, |row| {
            row.lease_losses = losses;
            row.last_error = Some(error);
            row.finish(OutboxStatus::Dead, view.now);
        });
        self.read(seq, losses, view)
    }

    fn read(&self, seq: i64, losses: u32, view: &View<'_>) -> Option<ClaimedRow> {
        let row = self.row(seq)?;
        Some(ClaimedRow {
            position: row.position(),
            created_at: date(row.created_at),
            event: match row.is_readable {
                true => Ok((row.attempts, Event::clone(&row.event))),
                false => Err("headers are not a JSON object whose values are texts".to_owned()),
            },
            is_dead: row.status == OutboxStatus::Dead,
            is_suspect: losses > 0,
            key: row.key.clone().filter(|_| matches!(view.mode, Mode::Ordered(_))),
        })
    }

    /// When the first row is due that a claim could take, or the first lease of another process ends.
    pub(super) fn next_due(&self, view: &View<'_>) -> Option<i64> {
        let due = self.first_due(view);
        let is_leased = |row: &&Row| row.locked_by.is_some() && !view.in_flight.contains(&row.seq);
        let leases = self.pending.iter().take_while(|at| at.due <= view.now).filter_map(|at| self.row(at.seq));
        let leases = leases.filter(|_| view.mode.leases_rows() && view.request.allow_suspects).filter(is_leased);
        let ends = leases.map(|row| (row.locked_at + in_micros(view.request.lease)).max(view.now + SOONEST_TAKEOVER));
        due.into_iter().chain(ends.min()).min()
    }

    fn first_due(&self, view: &View<'_>) -> Option<i64> {
        let is_ordered = matches!(view.mode, Mode::Ordered(_));
        let in_order = self.pending.iter().filter_map(|at| self.row(at.seq));
        let unordered = in_order.filter(|row| !is_ordered || row.key.is_none());
        let first = unordered.filter(|row| view.is_free(row)).map(|row| row.available_at).next();
        let head = |of_key: &BTreeSet<i64>| view.unfinished(self, of_key).next().map(|row| row.seq);
        let heads = self.by_key.values().filter(|_| is_ordered).filter_map(head).filter_map(|seq| self.row(seq));
        let first_head = heads.filter(|row| view.is_free(row)).map(|row| row.available_at).min();
        first.into_iter().chain(first_head).min()
    }

    /// The event types of which a row is due, and for how long the first row of each has been due.
    pub(super) fn oldest_due_by_type(&self, now: i64) -> Vec<(String, Duration)> {
        let mut types: Vec<(String, Duration)> = Vec::new();
        for row in self.pending.iter().take_while(|at| at.due <= now).filter_map(|at| self.row(at.seq)) {
            if !types.iter().any(|(event_type, _)| event_type == row.event.event_type()) {
                let age = Duration::from_micros((now - row.available_at) as u64);
                types.push((row.event.event_type().to_owned(), age));
            }
        }
        types.sort_unstable();
        types
    }
}

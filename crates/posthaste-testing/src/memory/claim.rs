use std::collections::{BTreeSet, HashSet};
use std::ops::Bound;

use posthaste_core::Event;
use posthaste_core::outbox::{
    DEAD_AFTER_LOSSES, DeadHead, MAX_CLAIM_BYTES, Candidate, Mode, OutboxStatus, ClaimedRow, Position, STARTED, SUSPECT_GROUP,
    ClaimedRows, ClaimRequest, select_runs, lease_lost_error,
};

use super::table::{MemoryTable, Row};
use super::{date, in_micros};

/// In microseconds, how soon a lease is looked at again that seems to have ended.
const SOONEST_TAKEOVER: i64 = 100_000;

/// One claim's look at a table.
pub(super) struct Look<'a> {
    mode: Mode,
    request: &'a ClaimRequest<'a>,
    in_flight: HashSet<i64>,
    now: i64,
}

impl<'a> Look<'a> {
    pub(super) fn new(mode: Mode, request: &'a ClaimRequest<'a>, now: i64) -> Self {
        Self { mode, request, in_flight: request.in_flight.iter().copied().collect(), now }
    }

    /// Whether this claim could take it once it is due.
    fn may_have(&self, row: &Row) -> bool {
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

    /// Of a row that is not leased now: whether it lost a lease.
    fn is_suspect(&self, row: &Row) -> bool {
        self.mode.leases_rows() && self.losses(row) > 0
    }

    /// Of a row that is not leased now: how many leases it lost, with the one that is taken over.
    fn losses(&self, row: &Row) -> u32 {
        let counts = |claim_id: &String| row.lease_losses == 0 || claim_id.ends_with(STARTED);
        row.lease_losses + u32::from(row.locked_by.as_ref().is_some_and(counts))
    }

    /// The rows of a key that are not finished.
    fn unfinished<'t>(&self, table: &'t MemoryTable, of_key: &'t BTreeSet<i64>) -> impl Iterator<Item = &'t Row> {
        let skips_dead = self.mode == Mode::Ordered(DeadHead::Skip);
        let rows = of_key.iter().filter_map(|seq| table.row(*seq));
        rows.filter(move |row| !skips_dead || row.status != OutboxStatus::Dead)
    }
}

/// Which rows a claim takes, in this order.
#[derive(Default)]
struct Choice {
    taken: Vec<i64>,
    more: bool,
    last: Option<Position>,
}

impl MemoryTable {
    pub(super) fn take(&mut self, look: &Look<'_>) -> ClaimedRows {
        let Choice { taken, more, last } = match look.mode {
            Mode::Ordered(_) => self.choose_by_key(look),
            _ => self.choose(look),
        };
        let rows = taken.into_iter().filter_map(|seq| self.hand_out(seq, look)).collect();
        ClaimedRows { rows, more, last, is_held_up: false }
    }

    fn choose(&self, look: &Look<'_>) -> Choice {
        let mut choice = Choice::default();
        let (mut weight, mut group) = (0, None);
        let after = look.request.after.map_or(Bound::Unbounded, Bound::Excluded);
        for position in self.pending.range((after, Bound::Unbounded)).take_while(|at| at.due <= look.now) {
            let Some(row) = self.row(position.seq).filter(|row| look.may_have(row) && look.is_due(row)) else {
                continue;
            };
            // The first row decides: suspects are taken together with their like, and only then.
            let losses = if look.mode.leases_rows() { look.losses(row) } else { 0 };
            let group = *group.get_or_insert(losses);
            if losses != group {
                continue;
            }
            let limit = match group {
                0 => look.request.limit,
                1 => look.request.limit.min(SUSPECT_GROUP),
                _ => 1,
            };
            choice.more = weight >= MAX_CLAIM_BYTES;
            if choice.more || choice.taken.len() >= limit {
                break;
            }
            weight += row.event.weight();
            choice.taken.push(row.seq);
            choice.last = Some(*position);
        }
        choice
    }

    fn choose_by_key(&self, look: &Look<'_>) -> Choice {
        let mut met = self.meet(look);
        let is_cut = met.len() > look.request.limit;
        met.truncate(look.request.limit);
        let last = met.last().map(|row| row.position);
        let taken = select_runs(&met).taken;
        let is_too_heavy = taken.len() < met.len() && !met.iter().any(|row| row.losses > 0);
        Choice { taken, more: is_cut || is_too_heavy, last }
    }

    /// The rows that a claim by key may take, the rows of a key from its head on. What waits behind others is never met,
    /// which is what blocking comes to.
    fn meet(&self, look: &Look<'_>) -> Vec<Candidate> {
        let of_row = |row: &Row, position: Position, predecessor: Option<i64>| Candidate {
            position,
            key: row.key.clone(),
            predecessor,
            losses: look.losses(row),
            bytes: row.event.weight(),
        };
        let mut met = Vec::new();
        for row in self.pending.iter().take_while(|at| at.due <= look.now).filter_map(|at| self.row(at.seq)) {
            if row.key.is_none() && look.may_have(row) && look.is_due(row) {
                met.push(of_row(row, row.position(), None));
            }
        }
        for of_key in self.by_key.values() {
            let (mut due, mut predecessor) = (i64::MIN, None);
            for row in look.unfinished(self, of_key).take_while(|row| look.may_have(row) && look.is_due(row)) {
                // Who waits for another is not due before that one is.
                due = due.max(row.available_at);
                met.push(of_row(row, Position { due, seq: row.seq }, predecessor));
                predecessor = Some(row.seq);
            }
        }
        met.retain(|row| look.request.after.is_none_or(|after| row.position > after));
        met.sort_unstable_by_key(|row| row.position);
        met
    }

    /// LeaseSet a row where rows are leased, and reads it.
    fn hand_out(&mut self, seq: i64, look: &Look<'_>) -> Option<ClaimedRow> {
        let losses = look.losses(self.row(seq)?);
        let is_suspect = look.is_suspect(self.row(seq)?);
        if look.mode.leases_rows() {
            self.change(seq, |row| {
                row.lease_losses = losses;
                match losses >= DEAD_AFTER_LOSSES && row.locked_by.is_some() {
                    true => {
                        row.last_error = Some(lease_lost_error(losses));
                        row.finish(OutboxStatus::Dead, look.now);
                    }
                    false => {
                        row.locked_by = Some(look.request.claim_id.to_owned());
                        row.locked_at = look.now;
                    }
                }
            });
        }
        let row = self.row(seq)?;
        Some(ClaimedRow {
            position: row.position(),
            created_at: date(row.created_at),
            event: match row.is_readable {
                true => Ok((row.attempts, Event::clone(&row.event))),
                false => Err("headers are not a JSON object whose values are texts".to_owned()),
            },
            is_dead: row.status == OutboxStatus::Dead,
            is_suspect,
            key: row.key.clone().filter(|_| matches!(look.mode, Mode::Ordered(_))),
        })
    }

    /// When the first row is due that a claim could take, or the first lease of another process ends.
    pub(super) fn next_due(&self, look: &Look<'_>) -> Option<i64> {
        let due = self.first_due(look);
        let is_leased = |row: &&Row| row.locked_by.is_some() && !look.in_flight.contains(&row.seq);
        let leases = self.pending.iter().take_while(|at| at.due <= look.now).filter_map(|at| self.row(at.seq));
        let leases = leases.filter(|_| look.mode.leases_rows() && look.request.allow_suspects).filter(is_leased);
        let ends = leases.map(|row| (row.locked_at + in_micros(look.request.lease)).max(look.now + SOONEST_TAKEOVER));
        due.into_iter().chain(ends.min()).min()
    }

    fn first_due(&self, look: &Look<'_>) -> Option<i64> {
        let is_ordered = matches!(look.mode, Mode::Ordered(_));
        let in_order = self.pending.iter().filter_map(|at| self.row(at.seq));
        let unordered = in_order.filter(|row| !is_ordered || row.key.is_none());
        let first = unordered.filter(|row| look.may_have(row)).map(|row| row.available_at).next();
        let head = |of_key: &BTreeSet<i64>| look.unfinished(self, of_key).next().map(|row| row.seq);
        let heads = self.by_key.values().filter(|_| is_ordered).filter_map(head).filter_map(|seq| self.row(seq));
        let first_head = heads.filter(|row| look.may_have(row)).map(|row| row.available_at).min();
        first.into_iter().chain(first_head).min()
    }

    /// Event types with something due.
    pub(super) fn pending_types(&self, now: i64) -> Vec<String> {
        let due = self.pending.iter().take_while(|at| at.due <= now).filter_map(|at| self.row(at.seq));
        let types: BTreeSet<&str> = due.map(|row| row.event.event_type()).collect();
        types.into_iter().map(str::to_owned).collect()
    }
}

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::cursor::{Cursor, ScanPosition};
use super::releaser::{Unreleased, release_in_background};
use super::sweeper::SWEEP_BATCH;
use super::{
    ClaimRequest, ClaimedRow, ClaimedRows, LeaseSet, Mode, OutboxItem, Owner, RowUpdate, SettledRows, Store, Table,
};
use crate::claims::ClaimToken;
use crate::{
    Claim, Claimed, Disposition, Failure, FaultKind, LogLimit, Settled, Settlement, Source, StoreError, Wakeup,
    heartbeat,
};

/// The pause before the next claim while rows wait for a row that another transaction has locked.
const LOCK_WAIT: Duration = Duration::from_millis(50);

/// How many failures of one event type are logged in this time.
const LOGGED_FAILURES: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(10);

/// The pending events of one outbox, or of one event type in it.
pub struct OutboxSource<S: Store> {
    table: Table<S>,
    cursor: Arc<Cursor>,
    closed: AtomicBool,
    skip_recent: Duration,
    log_limit: LogLimit,
}

impl<S: Store> OutboxSource<S> {
    pub(super) fn new(table: Table<S>, cursor: Arc<Cursor>) -> Self {
        let log_limit = LogLimit::new(LOGGED_FAILURES, LOG_WINDOW);
        Self { table, cursor, closed: AtomicBool::new(false), skip_recent: Duration::ZERO, log_limit }
    }

    /// Does not claim rows that are younger than this.
    #[must_use]
    pub fn skip_recent(mut self, age: Duration) -> Self {
        self.skip_recent = age;
        self
    }

    /// Claims due rows, and marks suspects as started. A row is returned only if its claim is known to have succeeded.
    async fn claim_and_start(
        &self,
        scan: &mut ScanPosition,
        began: Instant,
        request: ClaimRequest<'_>,
        number: u64,
    ) -> Result<(ClaimedRows, Option<Duration>), StoreError> {
        let leases_rows = self.table.mode().leases_rows();
        let (claim_id, started) = (request.claim_id.to_owned(), self.cursor.started_claim_id(number));
        let pending = PendingClaim::new(leases_rows.then_some(self), [claim_id.clone(), started.clone()]);
        let claimed = in_time(&self.table, self.claim_rows(scan, began, request)).await;
        let (mut claimed, next_due) = match claimed {
            // The database reported that it changed nothing.
            Err(error) if error.kind() != FaultKind::OutcomeUnknown => {
                pending.answered();
                return Err(error);
            }
            claimed => claimed?,
        };
        let suspects = claimed.rows.iter().filter(|row| row.is_suspect && !row.is_dead);
        let suspects: Vec<i64> = suspects.map(|row| row.position.seq).collect();
        if leases_rows && !suspects.is_empty() {
            let mark = self.table.store().mark_started(&claim_id, &started, &suspects);
            let marked = in_time(&self.table, mark).await?;
            if marked.len() < suspects.len() {
                release_in_background(self.table.clone(), self.cursor.clone(), Unreleased::Claims(vec![claim_id]));
            }
            claimed.rows.retain(|row| !row.is_suspect || marked.contains(&row.position.seq));
        }
        pending.answered();
        Ok((claimed, next_due))
    }

    /// Claims due rows from the scan position on, and moves it. Also returns how long until the next row is due.
    async fn claim_rows(
        &self,
        scan: &mut ScanPosition,
        began: Instant,
        mut request: ClaimRequest<'_>,
    ) -> Result<(ClaimedRows, Option<Duration>), StoreError> {
        let store = self.table.store();
        self.sweep_orphans().await?;
        request.after = self.cursor.scan_start(scan, began);
        let (mut claimed, mut waits_for_lock) = self.claim_and_block(&request).await?;
        if claimed.rows.is_empty() && !claimed.more && request.after.is_some() {
            scan.after = None;
            request.after = self.cursor.scan_start(scan, began);
            let waited_for_lock = waits_for_lock;
            (claimed, waits_for_lock) = self.claim_and_block(&request).await?;
            waits_for_lock |= waited_for_lock;
        }
        let is_full = claimed.more || claimed.rows.len() >= request.limit;
        let has_suspect = claimed.rows.iter().any(|row| row.is_suspect);
        let next_due = match is_full || has_suspect || request.after.is_some() {
            // There may be more, so the next claim follows at once.
            true => Some(Duration::ZERO),
            false => {
                let mut in_flight = request.in_flight.to_vec();
                in_flight.extend(claimed.rows.iter().map(|row| row.position.seq));
                match store.next_due(&ClaimRequest { in_flight: &in_flight, ..request.clone() }).await {
                    Ok(next_due) => next_due,
                    // The rows are claimed: an error here would lose them for a whole lease.
                    Err(_) if !claimed.rows.is_empty() => Some(Duration::ZERO),
                    Err(error) => return Err(error),
                }
            }
        };
        // Rows that wait for a locked row are due, but cannot be claimed in the next moment.
        let next_due = match waits_for_lock && claimed.rows.is_empty() {
            true => next_due.map(|wait| wait.max(LOCK_WAIT)),
            false => next_due,
        };
        if !has_suspect {
            scan.after = claimed.last.filter(|_| is_full);
        }
        Ok((claimed, next_due))
    }

    /// Claims due rows, and checks the rows that the claim blocked. True if some of those wait for a locked row.
    async fn claim_and_block(&self, request: &ClaimRequest<'_>) -> Result<(ClaimedRows, bool), StoreError> {
        let claimed = self.table.store().claim(request).await?;
        // The rows are leased, whether or not the check succeeds.
        let waits_for_lock = self.check_blocked(&claimed.blocked).await.unwrap_or_else(|error| {
            let error = error.chain();
            tracing::warn!(error, "failed to check blocked rows: the next sweep unblocks the orphans among them");
            false
        });
        Ok((claimed, waits_for_lock))
    }

    /// Ordered mode: sweeps one batch of blocked rows, when it is time.
    async fn sweep_orphans(&self) -> Result<(), StoreError> {
        let sweeper = self.table.sweeper();
        if matches!(self.table.mode(), Mode::Ordered(_))
            && let Some(after) = sweeper.next_batch()
        {
            let store = self.table.store();
            let swept = store.blocked_rows(after, SWEEP_BATCH).await?;
            if !swept.orphans.is_empty() {
                store.unblock_rows(&swept.orphans).await?;
            }
            sweeper.finished_batch(swept.last);
        }
        Ok(())
    }

    /// Ordered mode: a row may have been finished while a claim blocked others behind it, and nobody would unblock
    /// those. This runs when everybody can see that they are blocked, and unblocks those whose predecessor is finished
    /// or about to be. True if there are any.
    async fn check_blocked(&self, blocked: &[(i64, i64)]) -> Result<bool, StoreError> {
        if blocked.is_empty() {
            return Ok(false);
        }
        let store = self.table.store();
        let predecessors: BTreeSet<i64> = blocked.iter().map(|(_, predecessor)| *predecessor).collect();
        let predecessors: Vec<i64> = predecessors.into_iter().collect();
        let unlocked = store.unlocked_unfinished(&predecessors).await?;
        let free = blocked.iter().filter(|(_, predecessor)| !unlocked.contains(predecessor));
        let free: Vec<i64> = free.map(|(row, _)| *row).collect();
        if !free.is_empty() {
            store.unblock_rows(&free).await?;
        }
        Ok(!free.is_empty())
    }

    /// The fencing token of this item: it must be in the row, or in the owner row, when the item is settled.
    fn fencing_token(&self, item: &OutboxItem) -> String {
        match self.table.mode().leases_rows() {
            true => self.cursor.claim_id_of(item),
            false => self.table.ownership().fencing_token(item.token.generation),
        }
    }

    /// Turns claimed rows into items, and remembers their claims.
    async fn accept(
        &self,
        rows: Vec<ClaimedRow>,
        token: ClaimToken,
        until: Instant,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Accepted {
        let is_single = self.table.mode() == Mode::SingleNode;
        let permit = permit.map(Arc::new);
        let mut accepted = Accepted { items: Vec::with_capacity(rows.len()), skipped_some: false };
        let mut unreadable = Unreadable::default();
        for ClaimedRow { position, created_at, event, is_dead, is_suspect, key } in rows {
            let seq = position.seq;
            if is_dead {
                self.log_lost_leases(seq, &event);
                continue;
            }
            // A writer has pre-claimed it in memory since this claim began, and it may be delivered by now.
            if is_single && self.cursor.claims.was_claimed_meanwhile(seq) {
                accepted.skipped_some = true;
                continue;
            }
            match event {
                Ok(_) if unreadable.blocks(key.as_ref()) => unreadable.blocked_rows.push(seq),
                Ok((attempts, event)) => {
                    self.cursor.claims.insert(seq, token, until, permit.clone().filter(|_| is_suspect));
                    let bytes = event.weight();
                    let item = OutboxItem { seq, created_at, event: Arc::new(event), token, is_suspect };
                    accepted.items.push(Claimed {
                        key,
                        urgent: is_suspect,
                        ..Claimed::new(item, attempts.saturating_add(1), bytes)
                    });
                }
                Err(reason) => {
                    unreadable.is_suspect = is_suspect;
                    unreadable.keys.extend(key);
                    unreadable.rows.push((seq, reason));
                }
            }
        }
        self.mark_unreadable_dead(unreadable, token).await;
        accepted
    }

    /// Marks rows that cannot be read as events as DEAD, so that they are not claimed again, and releases the rows
    /// after them. If that fails, a later claim tries again.
    async fn mark_unreadable_dead(&self, unreadable: Unreadable, token: ClaimToken) {
        let Unreadable { rows, blocked_rows, is_suspect, .. } = unreadable;
        if !rows.is_empty() {
            let fencing_token = match (self.table.mode() == Mode::SingleNode, is_suspect) {
                (true, _) => self.table.ownership().fencing_token(token.generation),
                (false, true) => self.cursor.started_claim_id(token.number),
                (false, false) => self.cursor.claim_id(token.number),
            };
            let mut updates = Vec::with_capacity(rows.len());
            for (seq, reason) in rows {
                let table = self.table.store().table();
                tracing::error!(%table, seq, reason, "outbox row cannot be read as an event and becomes DEAD");
                updates.push(RowUpdate::dead(seq, &Failure::permanent("undecodable", reason)));
            }
            if let Err(error) = in_time(&self.table, self.table.store().settle(&[fencing_token], &updates)).await {
                tracing::warn!(
                    error = error.chain(),
                    "failed to mark unreadable rows as DEAD: a later claim tries again"
                );
            }
        }
        if !blocked_rows.is_empty() {
            let claim_ids = [self.cursor.claim_id(token.number), self.cursor.started_claim_id(token.number)];
            let leases = LeaseSet::Rows { claim_ids: &claim_ids, rows: &blocked_rows };
            if let Err(error) = in_time(&self.table, self.table.store().release(&leases)).await {
                tracing::warn!(
                    error = error.chain(),
                    "failed to release rows after an unreadable one: they wait until their leases end"
                );
            }
        }
    }

    fn log_lost_leases(&self, seq: i64, event: &Result<(u32, crate::Event), String>) {
        let table = self.table.store().table();
        let event = event.as_ref().ok().map(|(_, event)| event);
        let (id, event_type) = (event.map(crate::Event::id), event.map(crate::Event::event_type));
        tracing::error!(%table, seq, id, event_type, "event is DEAD: its leases were lost again and again, so it probably crashes its process");
    }

    /// Logs a failed attempt as a warning and a dead event as an error, never with the payload.
    fn log_failure(&self, settlement: &Settlement<'_, OutboxItem>) {
        // The hub logs failures of its channels in the same way as those of its other relays.
        if self.cursor.event_type.is_some() {
            return;
        }
        let (failure, retries_after) = match settlement.disposition {
            Disposition::Dead(failure) => (failure, None),
            Disposition::Retry { failure: Some(failure), after, .. } => (failure, Some(after)),
            Disposition::Done | Disposition::Retry { failure: None, .. } => return,
        };
        let (event, attempt) = (&settlement.claimed.item.event, settlement.claimed.attempt);
        let Some(suppressed) = self.log_limit.allows(event.event_type()) else { return };
        let (id, event_type, table) = (event.id(), event.event_type(), self.table.store().table());
        match retries_after {
            Some(after) => {
                tracing::warn!(%table, id, event_type, attempt, suppressed, %failure, ?after, "delivery failed; it is retried");
            }
            None => {
                tracing::error!(%table, id, event_type, attempt, suppressed, %failure, "event is DEAD: delivery was given up")
            }
        }
    }

    /// Removes the claims of these items.
    fn forget(&self, items: &[&OutboxItem]) {
        let mut is_permit_free = false;
        for item in items {
            is_permit_free |= self.cursor.claims.remove(item);
        }
        if is_permit_free {
            self.table.suspects_settled();
        }
    }

    /// Ends the source. True if this call ended it and it was the last one of its table.
    fn leave(&self) -> bool {
        let ended_before = self.closed.swap(true, Ordering::AcqRel);
        let is_last = !ended_before && self.table.leave();
        if self.table.ownership().stop_keeping(self.cursor.id()) && !is_last {
            self.table.wake_all();
        }
        is_last
    }
}

/// The items of a claim.
struct Accepted {
    items: Vec<Claimed<OutboxItem>>,
    /// Some rows were not accepted because a writer has pre-claimed them meanwhile.
    skipped_some: bool,
}

/// Rows of a claim that cannot be read as events, and the rows of their keys after them. The next claim decides if
/// those may be delivered.
#[derive(Default)]
struct Unreadable {
    rows: Vec<(i64, String)>,
    is_suspect: bool,
    keys: HashSet<Arc<str>>,
    blocked_rows: Vec<i64>,
}

impl Unreadable {
    fn blocks(&self, key: Option<&Arc<str>>) -> bool {
        key.is_some_and(|key| self.keys.contains(key))
    }
}

/// A running claim. If it is dropped before its result is known, its leases are released in the background. This
/// process chose its claim ids, so it can do that without knowing which rows are leased.
struct PendingClaim<'a, S: Store> {
    source: Option<&'a OutboxSource<S>>,
    claim_ids: [String; 2],
}

impl<'a, S: Store> PendingClaim<'a, S> {
    fn new(source: Option<&'a OutboxSource<S>>, claim_ids: [String; 2]) -> Self {
        Self { source, claim_ids }
    }

    fn answered(mut self) {
        self.source = None;
    }
}

impl<S: Store> Drop for PendingClaim<'_, S> {
    fn drop(&mut self) {
        if let Some(source) = self.source {
            let table = source.table.store().table();
            tracing::warn!(%table, "the result of a claim was lost: releasing the rows that it may have leased");
            let claims = Unreleased::Claims(self.claim_ids.to_vec());
            release_in_background(source.table.clone(), source.cursor.clone(), claims);
        }
    }
}

/// Gives up on a statement that takes too long: a connection that hangs must not delay other work. Its rows are fenced,
/// and the caller repeats the statement or releases the rows.
pub(super) async fn in_time<S: Store, T>(
    table: &Table<S>,
    statement: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match timeout(heartbeat::statement_timeout(table.row_lease()), statement).await {
        Ok(answer) => answer,
        Err(late) => Err(no_answer(late)),
    }
}

/// The statement may have taken effect all the same.
pub(super) fn no_answer(late: Elapsed) -> StoreError {
    StoreError::new("get an answer from the database", FaultKind::OutcomeUnknown, late)
}

#[async_trait]
impl<S: Store> Source for OutboxSource<S> {
    type Item = OutboxItem;

    async fn claim(&self, limit: usize) -> Result<Claim<OutboxItem>, StoreError> {
        let (table, cursor) = (&self.table, &*self.cursor);
        let mut scan = cursor.claiming.lock().await;
        let _may_run = table.claim_permit().await;
        let began = Instant::now();
        let leases_rows = table.mode().leases_rows();
        let generation = match leases_rows {
            true => 0,
            false => match table.acquire_ownership().await? {
                Owner::Us { generation } => generation,
                Owner::Other { remaining } => return Ok(Claim { items: Vec::new(), next_due: Some(remaining) }),
            },
        };
        let in_flight = cursor.claims.begin_claim(generation, began);
        let number = cursor.claims.next_number();
        let permit = if leases_rows { table.suspects().clone().try_acquire_owned().ok() } else { None };
        let request = ClaimRequest {
            event_type: cursor.event_type.as_deref(),
            in_flight: &in_flight,
            limit,
            after: None,
            claim_id: &cursor.claim_id(number),
            lease: table.row_lease(),
            allow_suspects: !leases_rows || permit.is_some(),
            skip_recent: self.skip_recent,
        };
        let claimed = self.claim_and_start(&mut scan, began, request, number).await;
        let accepted = match claimed {
            Ok((claimed, next_due)) => {
                let token = ClaimToken { number, generation };
                Ok((self.accept(claimed.rows, token, began + self.lease(), permit).await, next_due))
            }
            Err(error) => Err(error),
        };
        cursor.claims.end_claim();
        let (accepted, mut next_due) = accepted?;
        if accepted.skipped_some {
            next_due = Some(Duration::ZERO);
        }
        // Otherwise rows that are due but too young would be polled again and again.
        next_due = next_due.map(|wait| wait.max(self.skip_recent / 4));
        if !leases_rows && table.ownership().is_kept_by(cursor.id()) {
            // An owner that does not claim again would lose the ownership.
            next_due = Some(next_due.unwrap_or(Duration::MAX).min(table.row_lease() / 3));
        }
        let next_due = next_due.filter(|_| accepted.items.len() < limit);
        Ok(Claim { items: accepted.items, next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let settling = self.cursor.claims.settling(settlements.iter().map(|settlement| &settlement.claimed.item));
        // Rows claimed under an earlier ownership are lost: another process owned the table in between.
        let generation = settling.items().iter().map(|item| item.token.generation).max();
        let (mut tokens, mut updates) = (BTreeSet::<String>::new(), Vec::with_capacity(settlements.len()));
        let mut ours = settling.items().iter().peekable();
        let mut is_claimed = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let item = &settlement.claimed.item;
            let is_ours = ours.next_if(|next| std::ptr::eq(**next, item)).is_some();
            let is_current = is_ours && Some(item.token.generation) == generation;
            is_claimed.push(is_current);
            if is_current {
                tokens.insert(self.fencing_token(item));
                updates.push(RowUpdate::of(item.seq, settlement.claimed.attempt, settlement.disposition));
            }
        }
        let settled = match updates.is_empty() {
            true => SettledRows::default(),
            false => {
                updates.sort_unstable_by_key(|update| update.seq);
                let tokens: Vec<String> = tokens.into_iter().collect();
                let _may_run = self.table.settle_permit().await;
                in_time(&self.table, self.table.store().settle(&tokens, &updates)).await?
            }
        };
        if settling.finish(&settled.locked) {
            self.table.suspects_settled();
        }
        if matches!(self.table.mode(), Mode::Ordered(_)) {
            // Rows after these may be claimable now, wherever they are in the table.
            self.cursor.restart_scan();
            self.cursor.wakeup.wake();
        }
        let answer = settlements.iter().zip(is_claimed).map(|(settlement, is_claimed)| {
            let answer = if is_claimed { settled.answer(settlement.claimed.item.seq) } else { Settled::LostLease };
            if answer == Settled::Applied {
                self.log_failure(settlement);
            }
            answer
        });
        Ok(answer.collect())
    }

    async fn renew(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let until = Instant::now() + self.lease();
        let leases_rows = self.table.mode().leases_rows();
        let owner = match leases_rows {
            true => Owner::Us { generation: 0 },
            false => self.table.acquire_ownership().await?,
        };
        let mut answers = Vec::with_capacity(claimed.len());
        for claimed in claimed {
            let is_claimed = match owner {
                Owner::Us { generation } => self.cursor.claims.extend(&claimed.item, generation, until),
                Owner::Other { .. } => false,
            };
            answers.push(if is_claimed { Settled::Applied } else { Settled::LostLease });
        }
        let extended = claimed.iter().zip(&answers).filter(|(_, answer)| **answer == Settled::Applied);
        let extended: Vec<&OutboxItem> = extended.map(|(claimed, _)| &claimed.item).collect();
        if leases_rows && !extended.is_empty() {
            let (claim_ids, rows) = self.leases_of(&extended);
            let renewed = in_time(&self.table, self.table.store().renew(&claim_ids, &rows)).await?;
            let extended = claimed.iter().zip(&mut answers).filter(|(_, answer)| **answer == Settled::Applied);
            for (claimed, answer) in extended {
                *answer = renewed.answer(claimed.item.seq);
                if *answer == Settled::LostLease {
                    self.forget(&[&claimed.item]);
                }
            }
        }
        Ok(answers)
    }

    async fn release(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        let items = claimed.iter().map(|claimed| &claimed.item).filter(|item| self.cursor.claims.contains(item));
        let items: Vec<&OutboxItem> = items.collect();
        if self.table.mode().leases_rows() && !items.is_empty() {
            let (claim_ids, rows) = self.leases_of(&items);
            let leases = LeaseSet::Rows { claim_ids: &claim_ids, rows: &rows };
            let released = in_time(&self.table, self.table.store().release(&leases)).await?;
            let locked = items.iter().filter(|item| !released.applied.contains(&item.seq)).map(|item| (*item).clone());
            let locked: Vec<OutboxItem> = locked.collect();
            if !locked.is_empty() {
                release_in_background(self.table.clone(), self.cursor.clone(), Unreleased::Items(locked));
            }
        }
        self.forget(&items);
        self.cursor.restart_scan();
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.leave() && self.table.mode() == Mode::SingleNode {
            true => self.table.release_ownership().await,
            false => Ok(()),
        }
    }

    fn lease(&self) -> Duration {
        self.table.lease()
    }

    fn renews_on_own_thread(&self) -> bool {
        self.table.store().runs_on_own_thread()
    }

    fn wakeup(&self) -> &Wakeup {
        &self.cursor.wakeup
    }

    fn may_start(&self, _: &Claimed<OutboxItem>) -> bool {
        true
    }

    async fn revoked(&self) {
        std::future::pending().await
    }
}

impl<S: Store> OutboxSource<S> {
    /// The claim ids and the rows of items, for a statement about their leases.
    fn leases_of(&self, items: &[&OutboxItem]) -> (Vec<String>, Vec<i64>) {
        let rows: BTreeSet<i64> = items.iter().map(|item| item.seq).collect();
        (self.cursor.claim_ids(items.iter().copied()), rows.into_iter().collect())
    }
}

impl<S: Store> Drop for OutboxSource<S> {
    /// A source that is dropped without `close` no longer counts as open, so that another can be the last one. Its
    /// leases end by themselves.
    fn drop(&mut self) {
        self.leave();
    }
}

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::hold::Grip;
use super::lane::{Lane, Reading};
use super::releaser::{Unreleased, release_in_background};
use super::{Change, Changed, Leases, Mode, OutboxItem, Owner, Pending, Store, Table, Taken, Wanted};
use crate::{
    Claim, Claimed, Disposition, Failure, FaultKind, LogLimit, Settled, Settlement, Source, StoreError, Wakeup,
    heartbeat,
};

/// The pending events of one outbox, or of one event type in it.
pub struct OutboxSource<S: Store> {
    table: Table<S>,
    lane: Arc<Lane>,
    closed: AtomicBool,
    skip_recent: Duration,
    log_limit: LogLimit,
}

/// How soon a row is looked at again that waits for one that somebody has locked.
const HELD_UP: Duration = Duration::from_millis(50);

/// How many failures of one event type are logged in this time.
const LOGGED_FAILURES: u32 = 10;
const LOG_WINDOW: Duration = Duration::from_secs(10);

impl<S: Store> OutboxSource<S> {
    pub(super) fn new(table: Table<S>, lane: Arc<Lane>) -> Self {
        let log_limit = LogLimit::new(LOGGED_FAILURES, LOG_WINDOW);
        Self { table, lane, closed: AtomicBool::new(false), skip_recent: Duration::ZERO, log_limit }
    }

    /// Leaves rows alone that are younger than this.
    #[must_use]
    pub fn skip_recent(mut self, age: Duration) -> Self {
        self.skip_recent = age;
        self
    }

    /// Takes what is due, and moves on to behind it. Answers also how long until something else is due.
    async fn take(
        &self,
        reading: &mut Reading,
        started: Instant,
        mut wanted: Wanted<'_>,
    ) -> Result<(Taken, Option<Duration>), StoreError> {
        let store = self.table.store();
        wanted.behind = self.lane.start(reading, started);
        let mut taken = store.take(&wanted).await?;
        if taken.rows.is_empty() && !taken.more && wanted.behind.is_some() {
            reading.behind = None;
            wanted.behind = self.lane.start(reading, started);
            taken = store.take(&wanted).await?;
        }
        let is_full = taken.more || taken.rows.len() >= wanted.limit;
        let has_suspect = taken.rows.iter().any(|row| row.is_suspect);
        let next_due = match is_full || has_suspect || wanted.behind.is_some() {
            // There may be more: whoever asked for more is to come again at once.
            true => Some(Duration::ZERO),
            false => {
                let mut left_out = wanted.left_out.to_vec();
                left_out.extend(taken.rows.iter().map(|row| row.position.seq));
                match store.next_due(&Wanted { left_out: &left_out, ..wanted.clone() }).await {
                    Ok(next_due) => next_due,
                    // What is taken is ours, and thrown away it would stay so for a whole lease.
                    Err(_) if !taken.rows.is_empty() => Some(Duration::ZERO),
                    Err(error) => return Err(error),
                }
            }
        };
        // Rows that wait for one that somebody has locked are due, and will not be claimable in the next moment.
        let next_due = match taken.is_held_up && taken.rows.is_empty() {
            true => next_due.map(|wait| wait.max(HELD_UP)),
            false => next_due,
        };
        if !has_suspect {
            reading.behind = taken.last.filter(|_| is_full);
        }
        Ok((taken, next_due))
    }

    /// Takes what is due, and marks suspects as started, so that nothing is delivered whose claim may not be known.
    async fn take_and_start(
        &self,
        reading: &mut Reading,
        started: Instant,
        wanted: Wanted<'_>,
        ticket: u64,
    ) -> Result<(Taken, Option<Duration>), StoreError> {
        let leases_rows = self.table.mode().leases_rows();
        let (lock, started_lock) = (wanted.lock.to_owned(), self.lane.started_lock(ticket));
        let unanswered = Unanswered::new(leases_rows.then_some(self), [lock.clone(), started_lock.clone()]);
        let taken = in_time(&self.table, self.take(reading, started, wanted)).await;
        let (mut taken, next_due) = match taken {
            // The database said that it did nothing.
            Err(error) if error.kind() != FaultKind::OutcomeUnknown => {
                unanswered.answered();
                return Err(error);
            }
            taken => taken?,
        };
        let suspects = taken.rows.iter().filter(|row| row.is_suspect && !row.is_dead);
        let suspects: Vec<i64> = suspects.map(|row| row.position.seq).collect();
        if leases_rows && !suspects.is_empty() {
            let mark = self.table.store().mark_started(&lock, &started_lock, &suspects);
            let marked = in_time(&self.table, mark).await?;
            if marked.len() < suspects.len() {
                release_in_background(self.table.clone(), self.lane.clone(), Unreleased::Claims(vec![lock]));
            }
            taken.rows.retain(|row| !row.is_suspect || marked.contains(&row.position.seq));
        }
        unanswered.answered();
        Ok((taken, next_due))
    }

    /// What must still stand for the row of this item to be settled.
    fn fence(&self, item: &OutboxItem) -> String {
        match self.table.mode().leases_rows() {
            true => self.lane.lock_of(item),
            false => self.table.ownership().fence(item.generation),
        }
    }

    /// A failed attempt is a warning, an event that is given up an error; never with the payload.
    fn log_failure(&self, settlement: &Settlement<'_, OutboxItem>) {
        // The hub logs what becomes of the events in its channels, alike for all its relays.
        if self.lane.event_type.is_some() {
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
                tracing::error!(%table, id, event_type, attempt, suppressed, %failure, "event is dead: delivery was given up")
            }
        }
    }

    /// Rows that are no events go dead, so that nobody reads them again; it is no reason to stop when that fails.
    async fn bury(&self, fence: String, undecodable: Vec<(i64, String)>) {
        let mut changes = Vec::with_capacity(undecodable.len());
        for (seq, reason) in undecodable {
            tracing::error!(table = %self.table.store().table(), seq, reason, "outbox row cannot be read as an event");
            changes.push(Change::dead(seq, &Failure::permanent("undecodable", reason)));
        }
        if let Err(error) = in_time(&self.table, self.table.store().record(&[fence], &changes)).await {
            tracing::warn!(error = error.chain(), "undecodable outbox rows are left for a later claim");
        }
    }

    /// Whether this call is the one that ends the source, and whether it was the last of its outbox.
    fn leave(&self) -> bool {
        let ended_before = self.closed.swap(true, Ordering::AcqRel);
        let is_last = !ended_before && self.table.leave();
        if self.table.ownership().stop_keeping(self.lane.id()) && !is_last {
            self.table.wake_all();
        }
        is_last
    }

    /// The rows of a claim as items that are held now.
    async fn hold(&self, rows: Vec<Pending>, grip: Grip, permit: Option<OwnedSemaphorePermit>) -> Held {
        let is_single = self.table.mode() == Mode::SingleNode;
        let Grip { ticket, generation, .. } = grip;
        let permit = permit.map(Arc::new);
        let mut fence = None;
        let mut held = Held { items: Vec::with_capacity(rows.len()), met_in_passing: false };
        let (mut undecodable, mut behind) = (Vec::new(), Behind::default());
        for Pending { position, created_at, event, is_dead, is_suspect, key } in rows {
            let seq = position.seq;
            if is_dead {
                let table = self.table.store().table();
                tracing::error!(%table, seq, "outbox row is dead: nobody who claimed it settled it");
                continue;
            }
            // Claimed in memory by a writer since this claim began, and perhaps delivered since.
            if is_single && self.lane.holdings.met_in_passing(seq) {
                held.met_in_passing = true;
                continue;
            }
            match event {
                Ok(_) if behind.is_unreadable(key.as_ref()) => behind.rows.push(seq),
                Ok((attempts, event)) => {
                    self.lane.holdings.hold(seq, grip, permit.clone().filter(|_| is_suspect));
                    let bytes = event.weight();
                    let event = Arc::new(event);
                    let item = OutboxItem { seq, generation, created_at, event, ticket, is_suspect };
                    held.items.push(Claimed {
                        key,
                        urgent: is_suspect,
                        ..Claimed::new(item, attempts.saturating_add(1), bytes)
                    });
                }
                Err(reason) => {
                    let lock = || if is_suspect { self.lane.started_lock(ticket) } else { self.lane.lock(ticket) };
                    fence.get_or_insert_with(|| match is_single {
                        true => self.table.ownership().fence(generation),
                        false => lock(),
                    });
                    behind.keys.extend(key);
                    undecodable.push((seq, reason));
                }
            }
        }
        if let Some(fence) = fence {
            self.bury(fence, undecodable).await;
        }
        if !behind.rows.is_empty() {
            let locks = [self.lane.lock(ticket), self.lane.started_lock(ticket)];
            let leases = Leases::OfRows { locks: &locks, rows: &behind.rows };
            if let Err(error) = in_time(&self.table, self.table.store().release(&leases)).await {
                tracing::warn!(error = error.chain(), "rows behind an undecodable one wait for their leases");
            }
        }
        held
    }
}

/// The rows of a claim that stand behind one of their key that cannot be read: whether they may pass it is for the next
/// claim to say.
#[derive(Default)]
struct Behind {
    keys: HashSet<Arc<str>>,
    rows: Vec<i64>,
}

impl Behind {
    fn is_unreadable(&self, key: Option<&Arc<str>>) -> bool {
        key.is_some_and(|key| self.keys.contains(key))
    }
}

/// A claim that is under way. Dropped before it is answered, its leases are released in the background: this process chose
/// its locks, so it can, although it does not know which rows they hold.
struct Unanswered<'a, S: Store> {
    source: Option<&'a OutboxSource<S>>,
    locks: [String; 2],
}

impl<'a, S: Store> Unanswered<'a, S> {
    fn new(source: Option<&'a OutboxSource<S>>, locks: [String; 2]) -> Self {
        Self { source, locks }
    }

    fn answered(mut self) {
        self.source = None;
    }
}

impl<S: Store> Drop for Unanswered<'_, S> {
    fn drop(&mut self) {
        if let Some(source) = self.source {
            tracing::warn!(table = %source.table.store().table(), "the answer to a claim was lost: releasing what it leased");
            let locks = Unreleased::Claims(self.locks.to_vec());
            release_in_background(source.table.clone(), source.lane.clone(), locks);
        }
    }
}

/// A connection that hangs must not hold up what others could do meanwhile: whatever is cut off here is fenced, and
/// repeated or released.
pub(super) async fn in_time<S: Store, T>(
    table: &Table<S>,
    statement: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match timeout(heartbeat::statement_timeout(table.row_lease()), statement).await {
        Ok(answer) => answer,
        Err(late) => Err(no_answer(late)),
    }
}

/// It may have been carried out all the same.
pub(super) fn no_answer(late: Elapsed) -> StoreError {
    StoreError::new("get an answer from the database", FaultKind::OutcomeUnknown, late)
}

/// The locks of items and their rows, as statements about leases want them.
fn leases(lane: &Lane, items: &[&OutboxItem]) -> (Vec<String>, Vec<i64>) {
    let rows: BTreeSet<i64> = items.iter().map(|item| item.seq).collect();
    (lane.locks(items.iter().copied()), rows.into_iter().collect())
}

fn let_go<S: Store>(table: &Table<S>, lane: &Lane, items: &[&OutboxItem]) {
    let mut suspect_is_gone = false;
    for item in items {
        suspect_is_gone |= lane.holdings.let_go(item);
    }
    if suspect_is_gone {
        table.suspect_is_gone();
    }
}

struct Held {
    items: Vec<Claimed<OutboxItem>>,
    met_in_passing: bool,
}

#[async_trait]
impl<S: Store> Source for OutboxSource<S> {
    type Item = OutboxItem;

    async fn claim(&self, limit: usize) -> Result<Claim<OutboxItem>, StoreError> {
        let (table, lane) = (&self.table, &*self.lane);
        let mut reading = lane.claiming.lock().await;
        let started = Instant::now();
        let leases_rows = table.mode().leases_rows();
        let generation = match leases_rows {
            true => 0,
            false => match table.own().await? {
                Owner::Us { generation } => generation,
                Owner::Other { remaining } => return Ok(Claim { items: Vec::new(), next_due: Some(remaining) }),
            },
        };
        let left_out = lane.holdings.begin_claim(generation, started);
        let ticket = lane.holdings.next_ticket();
        let permit = if leases_rows { table.suspects().clone().try_acquire_owned().ok() } else { None };
        let wanted = Wanted {
            event_type: lane.event_type.as_deref(),
            left_out: &left_out,
            limit,
            behind: None,
            lock: &lane.lock(ticket),
            lease: table.row_lease(),
            suspects: !leases_rows || permit.is_some(),
            skip_recent: self.skip_recent,
        };
        let taken = self.take_and_start(&mut reading, started, wanted, ticket).await;
        let held = match taken {
            Ok((taken, next_due)) => {
                let grip = Grip { ticket, generation, until: started + self.lease() };
                Ok((self.hold(taken.rows, grip, permit).await, next_due))
            }
            Err(error) => Err(error),
        };
        lane.holdings.end_claim();
        let (held, mut next_due) = held?;
        if held.met_in_passing {
            next_due = Some(Duration::ZERO);
        }
        // What is due and too young is not worth asking for again and again.
        next_due = next_due.map(|wait| wait.max(self.skip_recent / 4));
        if !leases_rows && table.ownership().is_kept_by(lane.id()) {
            // An owner that does not claim again would lose its table.
            next_due = Some(next_due.unwrap_or(Duration::MAX).min(table.row_lease() / 3));
        }
        let next_due = next_due.filter(|_| held.items.len() < limit);
        Ok(Claim { items: held.items, next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let settling = self.lane.holdings.settling(settlements.iter().map(|settlement| &settlement.claimed.item));
        // What was claimed under an earlier ownership is lost: another process had the table in between.
        let generation = settling.items().iter().map(|item| item.generation).max();
        let (mut fences, mut changes) = (BTreeSet::<String>::new(), Vec::with_capacity(settlements.len()));
        let mut ours = settling.items().iter().peekable();
        let mut held = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let item = &settlement.claimed.item;
            let is_ours = ours.next_if(|next| std::ptr::eq(**next, item)).is_some();
            let is_held = is_ours && Some(item.generation) == generation;
            held.push(is_held);
            if is_held {
                fences.insert(self.fence(item));
                changes.push(Change::of(item.seq, settlement.claimed.attempt, settlement.disposition));
            }
        }
        let recorded = match changes.is_empty() {
            true => Changed::default(),
            false => {
                changes.sort_unstable_by_key(|change| change.seq);
                let fences: Vec<String> = fences.into_iter().collect();
                in_time(&self.table, self.table.store().record(&fences, &changes)).await?
            }
        };
        if settling.recorded(&recorded.locked) {
            self.table.suspect_is_gone();
        }
        if matches!(self.table.mode(), Mode::Ordered(_)) {
            // What waited behind these may be claimable, wherever it stands.
            self.lane.look_from_the_beginning();
            self.lane.wakeup.wake();
        }
        let answer = settlements.iter().zip(held).map(|(settlement, is_held)| {
            let answer = if is_held { recorded.answer(settlement.claimed.item.seq) } else { Settled::LostLease };
            if answer == Settled::Applied {
                self.log_failure(settlement);
            }
            answer
        });
        Ok(answer.collect())
    }

    async fn renew(&self, held: &[&Claimed<OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let until = Instant::now() + self.lease();
        let leases_rows = self.table.mode().leases_rows();
        let owner = match leases_rows {
            true => Owner::Us { generation: 0 },
            false => self.table.own().await?,
        };
        let mut answers = Vec::with_capacity(held.len());
        for claimed in held {
            let is_held = match owner {
                Owner::Us { generation } => self.lane.holdings.extend(&claimed.item, generation, until),
                Owner::Other { .. } => false,
            };
            answers.push(if is_held { Settled::Applied } else { Settled::LostLease });
        }
        let extended = held.iter().zip(&answers).filter(|(_, answer)| **answer == Settled::Applied);
        let extended: Vec<&OutboxItem> = extended.map(|(claimed, _)| &claimed.item).collect();
        if leases_rows && !extended.is_empty() {
            let (locks, rows) = leases(&self.lane, &extended);
            let renewed = in_time(&self.table, self.table.store().renew(&locks, &rows)).await?;
            let extended = held.iter().zip(&mut answers).filter(|(_, answer)| **answer == Settled::Applied);
            for (claimed, answer) in extended {
                *answer = renewed.answer(claimed.item.seq);
                if *answer == Settled::LostLease {
                    let_go(&self.table, &self.lane, &[&claimed.item]);
                }
            }
        }
        Ok(answers)
    }

    async fn release(&self, held: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        let items = held.iter().map(|claimed| &claimed.item).filter(|item| self.lane.holdings.has(item));
        let items: Vec<&OutboxItem> = items.collect();
        if self.table.mode().leases_rows() && !items.is_empty() {
            let (locks, rows) = leases(&self.lane, &items);
            let leases = Leases::OfRows { locks: &locks, rows: &rows };
            let seen = in_time(&self.table, self.table.store().release(&leases)).await?;
            let locked = items.iter().filter(|item| !seen.contains(&item.seq)).map(|item| (*item).clone());
            let locked: Vec<OutboxItem> = locked.collect();
            if !locked.is_empty() {
                release_in_background(self.table.clone(), self.lane.clone(), Unreleased::Items(locked));
            }
        }
        let_go(&self.table, &self.lane, &items);
        self.lane.look_from_the_beginning();
        Ok(())
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.leave() && self.table.mode() == Mode::SingleNode {
            true => self.table.disown().await,
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
        &self.lane.wakeup
    }
}

impl<S: Store> Drop for OutboxSource<S> {
    /// A source that was dropped and not closed does not keep the others from being the last; its lease runs out.
    fn drop(&mut self) {
        self.leave();
    }
}

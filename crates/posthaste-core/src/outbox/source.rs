use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::hold::Grip;
use super::lane::{Lane, Reading};
use super::{Change, Mode, OutboxItem, Owner, Pending, Store, Table, Taken, Wanted};
use crate::{Claim, Claimed, Failure, FaultKind, Settled, Settlement, Source, StoreError, Wakeup};

/// The pending events of one outbox, or of one event type in it.
pub struct OutboxSource<S: Store> {
    table: Table<S>,
    lane: Arc<Lane>,
    closed: AtomicBool,
    skip_recent: Duration,
}

impl<S: Store> OutboxSource<S> {
    pub(super) fn new(table: Table<S>, lane: Arc<Lane>) -> Self {
        Self { table, lane, closed: AtomicBool::new(false), skip_recent: Duration::ZERO }
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
        if !has_suspect {
            reading.behind = taken.last.filter(|_| is_full);
        }
        Ok((taken, next_due))
    }

    /// What must still stand for a row to be settled.
    fn fence(&self, ticket: u64, generation: i64) -> String {
        match self.table.mode().leases_rows() {
            true => self.lane.lock(ticket),
            false => self.table.ownership().fence(generation),
        }
    }

    /// Rows that are no events go dead, so that nobody reads them again; it is no reason to stop when that fails.
    async fn bury(&self, fence: String, undecodable: Vec<(i64, String)>) {
        let mut changes = Vec::with_capacity(undecodable.len());
        for (seq, reason) in undecodable {
            tracing::error!(table = %self.table.store().table(), seq, reason, "outbox row cannot be read as an event");
            changes.push(Change::dead(seq, &Failure::permanent("undecodable", reason)));
        }
        let _one_at_a_time = self.lane.recording.lock().await;
        if let Err(error) = in_time(&self.table, self.table.store().record(&[fence], &changes)).await {
            tracing::warn!(error = error.chain(), "undecodable outbox rows are left for a later claim");
        }
    }

    /// Whether this call is the one that ends the source, and whether it was the last of its outbox.
    fn leave(&self) -> bool {
        let ended_before = self.closed.swap(true, Ordering::AcqRel);
        !ended_before && self.table.leave()
    }

    /// The rows of a claim as items that are held now.
    async fn hold(
        &self,
        rows: Vec<Pending>,
        grip: Grip,
        mut permit: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Held {
        let is_single = self.table.mode() == Mode::SingleNode;
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
                    let permit = if is_suspect { permit.take() } else { None };
                    self.lane.holdings.hold(seq, grip, permit);
                    let bytes = event.weight();
                    let Grip { ticket, generation, .. } = grip;
                    let item = OutboxItem { seq, generation, created_at, event: Arc::new(event), ticket };
                    held.items.push(Claimed {
                        key,
                        urgent: is_suspect,
                        ..Claimed::new(item, attempts.saturating_add(1), bytes)
                    });
                }
                Err(reason) => {
                    behind.keys.extend(key);
                    undecodable.push((seq, reason));
                }
            }
        }
        if !undecodable.is_empty() {
            self.bury(self.fence(grip.ticket, grip.generation), undecodable).await;
        }
        if !behind.rows.is_empty() {
            let locks = [self.lane.lock(grip.ticket)];
            let released = in_time(&self.table, self.table.store().release(&locks, &behind.rows));
            if let Err(error) = released.await {
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

/// Gives back those items that are still held.
pub(super) async fn release<S: Store>(table: &Table<S>, lane: &Lane, items: &[&OutboxItem]) -> Result<(), StoreError> {
    let items: Vec<&OutboxItem> = items.iter().copied().filter(|item| lane.holdings.has(item)).collect();
    release_leases(table, lane, &items).await?;
    let_go(table, lane, &items);
    lane.look_from_the_beginning();
    Ok(())
}

/// Ends the leases of items, also of those that this process has forgotten: the locks are fence enough.
pub(super) async fn release_leases<S: Store>(
    table: &Table<S>,
    lane: &Lane,
    items: &[&OutboxItem],
) -> Result<(), StoreError> {
    if table.mode().leases_rows() && !items.is_empty() {
        let (locks, rows) = leases(lane, items);
        let _one_at_a_time = lane.recording.lock().await;
        in_time(table, table.store().release(&locks, &rows)).await?;
    }
    Ok(())
}

/// A connection that hangs must not hold up what others could do meanwhile: whatever is cut off here is fenced, and
/// repeated.
async fn in_time<S: Store, T>(
    table: &Table<S>,
    statement: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let enough = (table.row_lease() / 3).max(Duration::from_secs(1));
    match tokio::time::timeout(enough, statement).await {
        Ok(answer) => answer,
        Err(late) => Err(StoreError::new("get an answer from the database", FaultKind::Passing, late)),
    }
}

/// The locks of items and their rows, as statements about leases want them.
fn leases(lane: &Lane, items: &[&OutboxItem]) -> (Vec<String>, Vec<i64>) {
    let tickets: BTreeSet<u64> = items.iter().map(|item| item.ticket).collect();
    let rows: BTreeSet<i64> = items.iter().map(|item| item.seq).collect();
    (tickets.into_iter().map(|ticket| lane.lock(ticket)).collect(), rows.into_iter().collect())
}

pub(super) fn let_go<S: Store>(table: &Table<S>, lane: &Lane, items: &[&OutboxItem]) {
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
            false => match table.ownership().hold(table.store()).await? {
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
        let taken = self.take(&mut reading, started, wanted).await;
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
        if !leases_rows {
            // An owner who does not come again would lose its table.
            next_due = Some(next_due.unwrap_or(Duration::MAX).min(table.row_lease() / 3));
        }
        let next_due = next_due.filter(|_| held.items.len() < limit);
        Ok(Claim { items: held.items, next_due })
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        let settling = self.lane.holdings.settling(settlements.iter().map(|settlement| &settlement.claimed.item));
        // What was claimed under an earlier ownership is lost: another process had the table in between.
        let generation = settling.items().iter().map(|item| item.generation).max();
        let (mut fences, mut changes) = (BTreeSet::new(), Vec::with_capacity(settlements.len()));
        let mut ours = settling.items().iter().peekable();
        let mut held = Vec::with_capacity(settlements.len());
        for settlement in settlements {
            let item = &settlement.claimed.item;
            let is_ours = ours.next_if(|next| std::ptr::eq(**next, item)).is_some();
            let is_held = is_ours && Some(item.generation) == generation;
            held.push(is_held);
            if is_held {
                fences.insert((item.ticket, item.generation));
                changes.push(Change::of(item.seq, settlement.claimed.attempt, settlement.disposition));
            }
        }
        let recorded = match changes.is_empty() {
            true => HashSet::new(),
            false => {
                changes.sort_unstable_by_key(|change| change.seq);
                let fences: BTreeSet<String> =
                    fences.into_iter().map(|(ticket, generation)| self.fence(ticket, generation)).collect();
                let fences: Vec<String> = fences.into_iter().collect();
                let _one_at_a_time = self.lane.recording.lock().await;
                in_time(&self.table, self.table.store().record(&fences, &changes)).await?
            }
        };
        if settling.recorded() {
            self.table.suspect_is_gone();
        }
        if matches!(self.table.mode(), Mode::Ordered(_)) {
            // What waited behind these may be claimable, wherever it stands.
            self.lane.look_from_the_beginning();
            self.lane.wakeup.wake();
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
        let until = Instant::now() + self.lease();
        let leases_rows = self.table.mode().leases_rows();
        let owner = match leases_rows {
            true => Owner::Us { generation: 0 },
            false => self.table.ownership().hold(self.table.store()).await?,
        };
        let mut renewed = Vec::with_capacity(held.len());
        for claimed in held {
            renewed.push(match owner {
                Owner::Us { generation } => self.lane.holdings.extend(&claimed.item, generation, until),
                Owner::Other { .. } => false,
            });
        }
        let extended = held.iter().zip(&renewed).filter(|(_, extended)| **extended);
        let extended: Vec<&OutboxItem> = extended.map(|(claimed, _)| &claimed.item).collect();
        if leases_rows && !extended.is_empty() {
            let (locks, rows) = leases(&self.lane, &extended);
            let stand = {
                let _one_at_a_time = self.lane.recording.lock().await;
                in_time(&self.table, self.table.store().renew(&locks, &rows)).await?
            };
            for (claimed, renewed) in held.iter().zip(&mut renewed).filter(|(_, renewed)| **renewed) {
                *renewed = stand.contains(&claimed.item.seq);
                if !*renewed {
                    let_go(&self.table, &self.lane, &[&claimed.item]);
                }
            }
        }
        let answer = |renewed| if renewed { Settled::Applied } else { Settled::LostLease };
        Ok(renewed.into_iter().map(answer).collect())
    }

    async fn release(&self, held: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        let items: Vec<&OutboxItem> = held.iter().map(|claimed| &claimed.item).collect();
        release(&self.table, &self.lane, &items).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        match self.leave() && self.table.mode() == Mode::SingleNode {
            true => self.table.ownership().give_up(self.table.store()).await,
            false => Ok(()),
        }
    }

    fn lease(&self) -> Duration {
        self.table.lease()
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

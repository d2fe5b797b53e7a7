use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::hold::Grip;
use super::hook::{WriterHook, shielded};
use super::lane::Lane;
use super::source::{let_go, release_leases};
use super::store::is_unknown;
use super::{Mode, OutboxItem, Owner, Store, Table};
use crate::{Claimed, Event, HotDeadline, HotPermit, StoreError};

/// A transaction of the service in which events are written, and whose end can be seen: committed events go straight to
/// the listeners of this process, and the writer's hooks are told.
///
/// It dereferences to the database's connection: run the service's own statements on `&mut *transaction`. Dropped without
/// a commit it is rolled back.
pub struct Transaction<S: Store> {
    inner: Option<S::Transaction>,
    notes: Notes<S>,
}

/// A transaction that events may be written in.
///
/// It is one by its type, so that a write outside of a transaction does not compile. Implemented for [`Transaction`] and
/// for the transactions of sqlx.
pub trait InTransaction<S: Store>: Send {
    /// What statements run on, and what is to be done at its end, where that can be seen.
    fn parts(&mut self) -> (&mut S::Connection, Option<&mut Notes<S>>);
}

/// What is to be done at the end of a transaction.
pub struct Notes<S: Store> {
    table: Table<S>,
    hook: Option<Arc<dyn WriterHook>>,
    /// Where rows may be written as claimed.
    hot: Option<Hot>,
    handed: Vec<(Claimed<OutboxItem>, HotPermit)>,
    /// Something was written that has to be looked for.
    unclaimed: bool,
    /// A write has begun and not ended.
    is_writing: bool,
    /// The service has had the connection since the first write: who knows what its statements came to.
    is_touched: bool,
    /// For the hook: what each write wrote.
    batches: Vec<Vec<Event>>,
    ended: bool,
}

struct Hot {
    lane: Arc<Lane>,
    grip: Grip,
    deadline: HotDeadline,
}

/// How a transaction ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Committed,
    RolledBack,
    Unknown,
}

impl<S: Store> Transaction<S> {
    pub(super) async fn begin(table: &Table<S>, hook: Option<Arc<dyn WriterHook>>) -> Result<Self, StoreError> {
        // Who owns a table is asked before a connection is taken: that may be the only one.
        let owned = if table.mode() == Mode::SingleNode { hot(table).await } else { None };
        let inner = table.store().begin().await?;
        // Rows that are leased are leased from their insert, however long somebody waited for the connection.
        let hot = if table.mode().leases_rows() { hot(table).await } else { owned };
        let notes = Notes {
            table: table.clone(),
            hook,
            hot,
            handed: Vec::new(),
            unclaimed: false,
            is_writing: false,
            is_touched: false,
            batches: Vec::new(),
            ended: false,
        };
        Ok(Self { inner: Some(inner), notes })
    }

    /// Makes everything in it permanent. An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that the
    /// connection was lost on the way: it may have committed, and then its events will be delivered.
    pub async fn commit(mut self) -> Result<(), StoreError> {
        if let Some(inner) = &mut self.inner {
            self.notes.keep_what_stands(inner).await?;
        }
        if let Some(inner) = self.inner.take() {
            let committed = self.notes.table.store().commit(inner).await;
            self.notes.end(match &committed {
                Ok(()) => End::Committed,
                Err(error) if is_unknown(error) => End::Unknown,
                Err(_) => End::RolledBack,
            });
            committed?;
        }
        Ok(())
    }

    /// Undoes everything in it.
    pub async fn rollback(mut self) -> Result<(), StoreError> {
        if let Some(inner) = self.inner.take() {
            let rolled_back = self.notes.table.store().rollback(inner).await;
            // Without an answer the connection is gone, and the transaction with it.
            self.notes.end(End::RolledBack);
            rolled_back?;
        }
        Ok(())
    }
}

/// Under which claim rows may be born, if this process has a dispatcher that may deliver them.
async fn hot<S: Store>(table: &Table<S>) -> Option<Hot> {
    // Behind a closed door nobody delivers: owning the table would only keep others from it.
    let (door, lane) = table.hot().filter(|(door, _)| door.is_open())?;
    let (until, deadline) = (Instant::now() + table.lease(), door.deadline());
    let generation = match table.mode() {
        Mode::SingleNode => match table.ownership().hold(table.store()).await {
            Ok(Owner::Us { generation }) => generation,
            // Then they are looked for; and who cannot reach the database will hear of it when it begins.
            Ok(Owner::Other { .. }) | Err(_) => return None,
        },
        _ => 0,
    };
    let ticket = lane.holdings.next_ticket();
    Some(Hot { lane, grip: Grip { ticket, generation, until }, deadline })
}

impl<S: Store> Notes<S> {
    pub(super) fn is_of(&self, table: &Table<S>) -> bool {
        self.table.is_same(table)
    }

    /// Rows that the database has undone because of an error that nobody heeded are not handed over. In a transaction
    /// that cannot commit any more, this is where it is told.
    async fn keep_what_stands(&mut self, connection: &mut S::Connection) -> Result<(), StoreError> {
        // As a rule the one write is the last statement, and its success shows that all is well.
        if self.handed.is_empty() || !self.is_touched {
            return Ok(());
        }
        let rows: Vec<i64> = self.handed.iter().map(|(claimed, _)| claimed.item.seq).collect();
        let stand = self.table.store().standing(connection, &rows).await?;
        if let Some(hot) = self.hot.as_ref().filter(|_| stand.len() < rows.len()) {
            for (undone, _) in self.handed.extract_if(.., |(claimed, _)| !stand.contains(&claimed.item.seq)) {
                hot.lane.holdings.let_go(&undone.item);
            }
        }
        Ok(())
    }

    /// A place in the hot queue for this event, where it may have one.
    pub(super) fn permit(&mut self, event: &Event) -> Option<HotPermit> {
        self.hot.as_ref()?;
        let (door, _) = self.table.hot()?;
        if event.is_delayed() {
            door.skip_delayed();
            return None;
        }
        door.permit()
    }

    /// What rows that are born claimed are locked with.
    pub(super) fn lock(&self) -> Option<String> {
        let hot = self.hot.as_ref().filter(|_| self.table.mode().leases_rows())?;
        Some(hot.lane.lock(hot.grip.ticket))
    }

    /// A row was inserted as claimed: nobody else may claim it, from before it can be seen.
    pub(super) fn born_claimed(&mut self, seq: i64, event: &Event, permit: HotPermit) {
        let Some(Hot { lane, grip, .. }) = &self.hot else { return };
        lane.holdings.hold(seq, *grip, None);
        let item = OutboxItem {
            seq,
            generation: grip.generation,
            created_at: chrono::Utc::now(),
            event: Arc::new(event.clone()),
            ticket: grip.ticket,
        };
        self.handed.push((Claimed::new(item, 1, event.weight()), permit));
    }

    pub(super) fn born_unclaimed(&mut self) {
        self.unclaimed = true;
    }

    pub(super) fn begin_write(&mut self) {
        self.is_writing = true;
        // Before the first one there is nothing that could have been undone.
        self.is_touched &= !self.handed.is_empty();
    }

    /// A write is through; its events are the hook's.
    pub(super) fn end_write(&mut self, events: Vec<Event>) {
        self.is_writing = false;
        if self.hook.is_some() {
            self.batches.push(events);
        }
    }

    fn end(&mut self, end: End) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.end_claims(end);
        if (self.unclaimed || self.is_writing) && end != End::RolledBack {
            self.table.committed();
        }
        let Some(hook) = &self.hook else { return };
        for events in &self.batches {
            match end {
                End::Committed => shielded("after_commit", || hook.after_commit(events)),
                End::RolledBack | End::Unknown => shielded("after_rollback", || hook.after_rollback(events)),
            }
        }
    }

    fn end_claims(&mut self, end: End) {
        let handed = std::mem::take(&mut self.handed);
        let (Some(hot), false) = (&self.hot, handed.is_empty()) else { return };
        let given_back = match end {
            End::Committed => match self.table.hot().map(|(door, _)| door.hand_over(handed, hot.deadline)) {
                Some(Err(given_back)) => given_back,
                _ => return,
            },
            End::Unknown => handed.into_iter().map(|(claimed, _)| claimed).collect(),
            End::RolledBack => {
                for (claimed, _) in &handed {
                    hot.lane.holdings.let_go(&claimed.item);
                }
                return;
            }
        };
        let (table, lane) = (self.table.clone(), hot.lane.clone());
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(give_back(table, lane, given_back))),
            Err(_) => tracing::warn!("a transaction ended outside of the runtime: its events wait for their leases"),
        }
    }
}

/// Others may have these. Repeated until it ran, or until their leases have ended anyway.
async fn give_back<S: Store>(table: Table<S>, lane: Arc<Lane>, items: Vec<Claimed<OutboxItem>>) {
    let items: Vec<&OutboxItem> = items.iter().map(|claimed| &claimed.item).collect();
    let until = Instant::now() + table.row_lease();
    let mut pause = Duration::from_millis(20);
    while let Err(error) = release_leases(&table, &lane, &items).await {
        tracing::warn!(error = error.chain(), "events are not given back yet; trying again");
        if Instant::now() >= until {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
    let_go(&table, &lane, &items);
    table.committed();
}

impl<S: Store> InTransaction<S> for Transaction<S> {
    fn parts(&mut self) -> (&mut S::Connection, Option<&mut Notes<S>>) {
        let Self { inner, notes } = self;
        match inner {
            Some(inner) => (&mut **inner, Some(notes)),
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl<S: Store> Deref for Transaction<S> {
    type Target = S::Connection;

    fn deref(&self) -> &S::Connection {
        match &self.inner {
            Some(inner) => inner,
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl<S: Store> DerefMut for Transaction<S> {
    fn deref_mut(&mut self) -> &mut S::Connection {
        self.notes.is_touched = true;
        self.parts().0
    }
}

impl<S: Store> Drop for Transaction<S> {
    fn drop(&mut self) {
        // A commit that was dropped half way may have happened.
        let end = if self.inner.is_some() { End::RolledBack } else { End::Unknown };
        self.notes.end(end);
    }
}

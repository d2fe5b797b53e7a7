use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::hold::Grip;
use super::hook::{WriterHook, shielded};
use super::lane::Lane;
use super::releaser::{Unreleased, release_in_background};
use super::{Mode, OutboxItem, Owner, Store, Table};
use crate::{Claimed, Event, FaultKind, HotDeadline, HotPermit, StoreError};

/// A transaction of the service in which events are written, and whose end can be seen: committed events go straight to
/// the listeners of this process, and the writer's hooks are told.
///
/// It dereferences to the database's connection: run the service's own statements on `&mut *transaction`. Dropped without
/// a commit it is rolled back.
pub struct Transaction<S: Store>(Option<Open<S>>);

/// A transaction that has not ended.
struct Open<S: Store> {
    inner: S::Transaction,
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
    /// Every row that was written.
    rows: Vec<i64>,
    /// Something was written that has to be looked for.
    unclaimed: bool,
    /// The events of the write that is under way.
    writing: Option<Vec<String>>,
    /// The events of writes that failed or were dropped half way: some of their rows may be there, and leased.
    cut_off: Vec<String>,
    /// The database may have rolled the transaction back because of an error that the service, or a write of ours, has met
    /// since the last statement that succeeded.
    is_unproven: bool,
    /// As it was before the connection was last given out.
    was_unproven: bool,
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
            rows: Vec::new(),
            unclaimed: false,
            writing: None,
            cut_off: Vec::new(),
            is_unproven: false,
            was_unproven: false,
            batches: Vec::new(),
            ended: false,
        };
        Ok(Self(Some(Open { inner, notes })))
    }

    /// Makes everything in it permanent. An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that the
    /// connection was lost on the way: it may have committed, and then its events will be delivered. Any other error means
    /// that it was rolled back, also if the database did so long before, because of an error that the service ignored.
    ///
    /// A commit that has begun is carried through even if this future is dropped.
    pub async fn commit(mut self) -> Result<(), StoreError> {
        match self.0.take() {
            Some(open) => Uncancelled::new(open.commit()).await,
            None => Ok(()),
        }
    }

    /// Undoes everything in it.
    pub async fn rollback(mut self) -> Result<(), StoreError> {
        match self.0.take() {
            Some(open) => Uncancelled::new(open.rollback()).await,
            None => Ok(()),
        }
    }
}

impl<S: Store> Open<S> {
    async fn commit(self) -> Result<(), StoreError> {
        let Self { mut inner, mut notes } = self;
        if let Err(error) = notes.keep_survivors(&mut inner).await {
            // It has failed already: what rolling it back answers says nothing new.
            let _ = notes.table.store().rollback(inner).await;
            notes.end(End::of_error(&error));
            return Err(error);
        }
        let committed = notes.table.store().commit(inner).await;
        notes.end(match &committed {
            Ok(()) => End::Committed,
            Err(error) => End::of_error(error),
        });
        committed
    }

    async fn rollback(self) -> Result<(), StoreError> {
        let Self { inner, mut notes } = self;
        let rolled_back = notes.table.store().rollback(inner).await;
        // Without an answer the connection is gone, and the transaction with it.
        notes.end(End::RolledBack);
        rolled_back
    }
}

impl End {
    fn of_error(error: &StoreError) -> Self {
        match error.kind() {
            FaultKind::OutcomeUnknown => Self::Unknown,
            FaultKind::Passing | FaultKind::Lasting => Self::RolledBack,
        }
    }
}

/// Runs to its end even if the caller stops waiting: then the rest of it becomes a task of its own.
struct Uncancelled<T: Send + 'static>(Option<BoxFuture<'static, T>>);

impl<T: Send + 'static> Uncancelled<T> {
    fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(future)))
    }
}

impl<T: Send + 'static> Future for Uncancelled<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(future) = &mut self.0 else { return Poll::Pending };
        let polled = future.as_mut().poll(context);
        if polled.is_ready() {
            self.0 = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Uncancelled<T> {
    fn drop(&mut self) {
        if let (Some(future), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// Under which claim rows may be born, if this process has a dispatcher that may deliver them.
async fn hot<S: Store>(table: &Table<S>) -> Option<Hot> {
    // Behind a closed door nobody delivers: owning the table would only keep others from it.
    let (door, lane) = table.hot().filter(|(door, _)| door.is_open())?;
    let (until, deadline) = (Instant::now() + table.lease(), door.deadline());
    let generation = match table.mode() {
        Mode::SingleNode => match table.own().await {
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

    /// Rows that the database has undone because of an error that the service ignored are not handed over. In a transaction
    /// that cannot commit any more, this is where it is told.
    async fn keep_survivors(&mut self, connection: &mut S::Connection) -> Result<(), StoreError> {
        // As a rule a write is the last statement, and its success shows that all is well.
        if !self.is_unproven {
            return Ok(());
        }
        let surviving = self.table.store().surviving(connection, &self.rows).await?;
        if let Some(hot) = self.hot.as_ref().filter(|_| surviving.len() < self.rows.len()) {
            for (undone, _) in self.handed.extract_if(.., |(claimed, _)| !surviving.contains(&claimed.item.seq)) {
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
        self.born(seq, event);
        let Some(Hot { lane, grip, .. }) = &self.hot else { return };
        lane.holdings.hold(seq, *grip, None);
        let item = OutboxItem {
            seq,
            generation: grip.generation,
            created_at: chrono::Utc::now(),
            event: Arc::new(event.clone()),
            ticket: grip.ticket,
            is_suspect: false,
        };
        self.handed.push((Claimed::new(item, 1, event.weight()), permit));
    }

    pub(super) fn born_unclaimed(&mut self, seq: i64, event: &Event) {
        self.born(seq, event);
        self.unclaimed = true;
    }

    fn born(&mut self, seq: i64, event: &Event) {
        self.rows.push(seq);
        if let Some(writing) = &mut self.writing {
            writing.retain(|id| id != event.id());
        }
    }

    /// A write of these events begins. Until it has succeeded, nobody knows what it left behind.
    pub(super) fn begin_write(&mut self, ids: &[String]) {
        self.cut_off.extend(self.writing.take().unwrap_or_default());
        self.writing = Some(ids.to_vec());
        // Before the first row there is nothing that could have been undone.
        self.was_unproven &= !self.rows.is_empty();
    }

    /// The connection is given out: nobody knows what becomes of it until a write succeeds.
    fn distrust(&mut self) {
        self.was_unproven = self.is_unproven;
        self.is_unproven = true;
    }

    /// A write has succeeded; its events are the hook's.
    pub(super) fn end_write(&mut self, events: Vec<Event>) {
        self.writing = None;
        self.is_unproven = self.was_unproven;
        if self.hook.is_some() {
            self.batches.push(events);
        }
    }

    fn end(&mut self, end: End) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.end_cut_off(end);
        self.end_claims(end);
        if self.unclaimed && end != End::RolledBack {
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
        let items = given_back.into_iter().map(|claimed| claimed.item).collect();
        release_in_background(self.table.clone(), hot.lane.clone(), Unreleased::Items(items));
    }

    /// Rows of writes that were cut off may be there, leased by the lock of this transaction and known to nobody.
    fn end_cut_off(&mut self, end: End) {
        self.cut_off.extend(self.writing.take().unwrap_or_default());
        let mut ids = std::mem::take(&mut self.cut_off);
        // A write that failed because its event was written before has left nothing behind.
        ids.retain(|id| !self.handed.iter().any(|(claimed, _)| claimed.item.event.id() == id));
        if ids.is_empty() || end == End::RolledBack {
            return;
        }
        if let (Some(lock), Some(hot)) = (self.lock(), &self.hot) {
            let events = Unreleased::Events { lock, ids, is_committed: end == End::Committed };
            release_in_background(self.table.clone(), hot.lane.clone(), events);
        }
        self.table.committed();
    }
}

impl<S: Store> Drop for Notes<S> {
    /// A commit that was dropped half way may have happened.
    fn drop(&mut self) {
        self.end(End::Unknown);
    }
}

impl<S: Store> Transaction<S> {
    fn open(&mut self) -> &mut Open<S> {
        match &mut self.0 {
            Some(open) => open,
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl<S: Store> InTransaction<S> for Transaction<S> {
    fn parts(&mut self) -> (&mut S::Connection, Option<&mut Notes<S>>) {
        let Open { inner, notes } = self.open();
        notes.distrust();
        (&mut **inner, Some(notes))
    }
}

impl<S: Store> Deref for Transaction<S> {
    type Target = S::Connection;

    fn deref(&self) -> &S::Connection {
        match &self.0 {
            Some(open) => &open.inner,
            None => unreachable!("only commit and rollback take it, and they take all"),
        }
    }
}

impl<S: Store> DerefMut for Transaction<S> {
    fn deref_mut(&mut self) -> &mut S::Connection {
        let Open { inner, notes } = self.open();
        notes.distrust();
        inner
    }
}

impl<S: Store> Drop for Transaction<S> {
    fn drop(&mut self) {
        if let Some(mut open) = self.0.take() {
            open.notes.end(End::RolledBack);
        }
    }
}

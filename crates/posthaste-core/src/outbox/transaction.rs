use std::ops::{Deref, DerefMut, Range};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::hook::{WriterHook, call_hook};
use super::hot_path::HotPath;
use super::{InTransaction, Mode, Store, Table, WriteStore};
use crate::{Event, FaultKind, StoreError};

/// A transaction of the service in which events are written. The outbox sees its end: committed events go straight to
/// the listeners of this process, and the writer's hooks are called.
///
/// It dereferences to the database's connection: run the service's own statements on `&mut *transaction`. Dropped
/// without a commit, it is rolled back.
///
/// # Panics
///
/// On MySQL a write that has begun runs to its end even if its future is dropped, because the driver cannot use a
/// connection again whose statement was dropped. The next `write`, `commit` or `rollback` waits for it. Dereferencing
/// cannot wait, and panics if it is the first use of the transaction after a write was dropped.
pub struct Transaction<S: Store> {
    /// `None` while a task uses it, and once a commit or a rollback has begun.
    inner: Option<S::Transaction>,
    /// The insert that runs, where it must not be dropped half way.
    insert: Option<JoinHandle<Inserted<S>>>,
    table: Table<S>,
    hook: Option<Arc<dyn WriterHook>>,
    /// `None` if this process has no dispatcher that could deliver the events.
    hot_path: Option<HotPath>,
    /// The numbers of all rows that were written.
    rows: Vec<i64>,
    /// At least one row was written that is not pre-claimed, so that the dispatcher has to claim it.
    wrote_unclaimed: bool,
    /// The ids of the events that the running write has not inserted yet.
    writing: Vec<String>,
    /// The ids of events whose write failed or was dropped half way.
    interrupted: Vec<String>,
    /// The database may have rolled the transaction back because of an error since the last statement that succeeded.
    /// The service may have ignored that error.
    is_unproven: bool,
    /// The same, as it was before the connection was last used.
    was_unproven: bool,
    /// For the hook: the events of each write.
    written: Vec<Arc<Vec<Event>>>,
    ended: bool,
}

/// What an insert returns that runs as a task of its own: the transaction, and the numbers of the rows.
type Inserted<S> = (<S as WriteStore>::Transaction, Result<Vec<i64>, StoreError>);

/// The task of an insert panicked, or its runtime ended.
fn lost() -> StoreError {
    let reason = "the transaction was rolled back, because the task of one of its writes did not finish";
    StoreError::new("write to the outbox", FaultKind::Permanent, reason)
}

const IN_USE: &str = "a write of this transaction was dropped and has not ended: call write, commit or rollback first";

/// How a transaction ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Committed,
    RolledBack,
    Unknown,
}

impl End {
    fn of_error(error: &StoreError) -> Self {
        match error.kind() {
            FaultKind::OutcomeUnknown => Self::Unknown,
            FaultKind::Transient | FaultKind::Permanent => Self::RolledBack,
        }
    }
}

impl<S: Store> Transaction<S> {
    pub(super) async fn begin(table: &Table<S>, hook: Option<Arc<dyn WriterHook>>) -> Result<Self, StoreError> {
        // The ownership is acquired before a connection is taken from the pool: that may be the only one.
        let owned = if table.mode() == Mode::SingleNode { HotPath::open(table).await } else { None };
        let inner = table.store().begin().await?;
        // A row lease starts with the insert, however long this process waited for the connection.
        let hot_path = if table.mode().leases_rows() { HotPath::open(table).await } else { owned };
        Ok(Self {
            inner: Some(inner),
            insert: None,
            table: table.clone(),
            hook,
            hot_path,
            rows: Vec::new(),
            wrote_unclaimed: false,
            writing: Vec::new(),
            interrupted: Vec::new(),
            is_unproven: false,
            was_unproven: false,
            written: Vec::new(),
            ended: false,
        })
    }

    /// Commits. An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that the connection was
    /// lost: the transaction may have committed, and then its events will be delivered. Any other error means that it
    /// was rolled back, perhaps long before by the database, because of an error that the service ignored.
    ///
    /// A commit that has begun runs to its end even if this future is dropped.
    pub async fn commit(self) -> Result<(), StoreError> {
        Uncancelled::new(self.commit_now()).await
    }

    /// Rolls back.
    pub async fn rollback(self) -> Result<(), StoreError> {
        Uncancelled::new(self.rollback_now()).await
    }

    async fn commit_now(mut self) -> Result<(), StoreError> {
        self.finish_dropped_insert().await;
        let Some(mut inner) = self.inner.take() else { return Err(lost()) };
        if let Err(error) = self.check_surviving(&mut inner).await {
            // The commit has failed already, whatever the rollback returns.
            let _ = self.table.store().rollback(inner).await;
            self.end(End::of_error(&error));
            return Err(error);
        }
        let committed = self.table.store().commit(inner).await;
        self.end(match &committed {
            Ok(()) => End::Committed,
            Err(error) => End::of_error(error),
        });
        committed
    }

    async fn rollback_now(mut self) -> Result<(), StoreError> {
        self.finish_dropped_insert().await;
        let Some(inner) = self.inner.take() else { return Ok(()) };
        let rolled_back = self.table.store().rollback(inner).await;
        // If the rollback fails, the connection is gone, and the transaction with it.
        self.end(End::RolledBack);
        rolled_back
    }

    /// Fails if the transaction cannot commit any more. Rows that the database has rolled back are not delivered.
    async fn check_surviving(&mut self, connection: &mut S::Connection) -> Result<(), StoreError> {
        // Usually a write is the last statement, and its success proves that the transaction is intact.
        if !self.is_unproven {
            return Ok(());
        }
        let surviving = self.table.store().surviving(connection, &self.rows).await?;
        if let Some(hot_path) = self.hot_path.as_mut().filter(|_| surviving.len() < self.rows.len()) {
            hot_path.keep_only(&surviving);
        }
        Ok(())
    }

    /// True if the outbox of this table began the transaction.
    pub(super) fn is_of(&self, table: &Table<S>) -> bool {
        self.table.is_same(table)
    }

    /// Inserts events, pre-claimed as far as the hot queue has room.
    pub(super) async fn write(&mut self, events: Vec<Event>) -> Result<(), StoreError> {
        self.finish_dropped_insert().await;
        self.begin_write(&events);
        let events = Arc::new(events);
        let hot_path = self.hot_path.as_ref();
        let mut permits: Vec<_> = events.iter().map(|event| hot_path.and_then(|hot| hot.permit(event))).collect();
        let claim_id = hot_path.and_then(|hot| hot.claim_id(self.table.mode()));
        let mut from = 0;
        // Row numbers must follow the order of the events, so each insert has neighbours that are all pre-claimed or
        // all not.
        while from < events.len() {
            let is_hot = permits[from].is_some();
            let count = permits[from..].iter().take_while(|permit| permit.is_some() == is_hot).count();
            let part = from..from + count;
            let rows = self.insert(&events, part.clone(), claim_id.clone().filter(|_| is_hot)).await?;
            for ((seq, event), permit) in rows.into_iter().zip(&events[part]).zip(&mut permits[from..]) {
                self.rows.push(seq);
                self.writing.retain(|id| id != event.id());
                match (permit.take(), &mut self.hot_path) {
                    (Some(permit), Some(hot_path)) => hot_path.pre_claim(seq, event, permit),
                    _ => self.wrote_unclaimed = true,
                }
            }
            from += count;
        }
        if let Some(hook) = &self.hook {
            call_hook("after_write", || hook.after_write(&events));
            self.written.push(events);
        }
        self.is_unproven = self.was_unproven;
        Ok(())
    }

    /// Inserts a part of the events, and returns the numbers of their rows.
    async fn insert(
        &mut self,
        events: &Arc<Vec<Event>>,
        part: Range<usize>,
        claim_id: Option<String>,
    ) -> Result<Vec<i64>, StoreError> {
        let table = self.table.clone();
        if table.store().is_cancel_safe() {
            let part: Vec<&Event> = events[part].iter().collect();
            return table.store().insert(self.open_connection(), &part, claim_id.as_deref()).await;
        }
        let Some(mut inner) = self.inner.take() else { return Err(lost()) };
        let events = events.clone();
        self.insert = Some(tokio::spawn(async move {
            let part: Vec<&Event> = events[part].iter().collect();
            let inserted = table.store().insert(&mut inner, &part, claim_id.as_deref()).await;
            (inner, inserted)
        }));
        self.finish_insert().await.unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Waits for the insert that runs as a task, if there is one. If this is dropped, the next call waits for it.
    async fn finish_insert(&mut self) -> Option<Result<Vec<i64>, StoreError>> {
        let finished = self.insert.as_mut()?.await;
        self.insert = None;
        Some(match finished {
            Ok((inner, inserted)) => {
                self.inner = Some(inner);
                inserted
            }
            // The task has dropped the transaction.
            Err(_) => Err(lost()),
        })
    }

    /// Waits for the insert of a write that was dropped. Its events are among the interrupted ones, whether or not it
    /// succeeds.
    async fn finish_dropped_insert(&mut self) {
        let _ = self.finish_insert().await;
    }

    /// Until the write has succeeded, it is unknown which of its rows exist.
    fn begin_write(&mut self, events: &[Event]) {
        self.use_connection();
        self.interrupted.append(&mut self.writing);
        self.writing = events.iter().map(|event| event.id().to_owned()).collect();
        // Before the first row there is nothing that the database could have rolled back.
        self.was_unproven &= !self.rows.is_empty();
    }

    /// The connection is used: until a write succeeds, the transaction may have been rolled back by an error on it.
    fn use_connection(&mut self) {
        self.was_unproven = self.is_unproven;
        self.is_unproven = true;
    }

    fn open_connection(&mut self) -> &mut S::Connection {
        match &mut self.inner {
            Some(inner) => inner,
            None => panic!("{IN_USE}"),
        }
    }

    fn end(&mut self, end: End) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.end_interrupted(end);
        if let Some(hot_path) = &mut self.hot_path {
            hot_path.finish(&self.table, end);
        }
        if self.wrote_unclaimed && end != End::RolledBack {
            self.table.committed();
        }
        let Some(hook) = &self.hook else { return };
        for events in &self.written {
            match end {
                End::Committed => call_hook("after_commit", || hook.after_commit(events)),
                End::RolledBack | End::Unknown => call_hook("after_rollback", || hook.after_rollback(events)),
            }
        }
    }

    /// Releases the rows of writes that failed or were dropped half way: they may exist and be pre-claimed.
    fn end_interrupted(&mut self, end: End) {
        self.interrupted.append(&mut self.writing);
        let mut ids = std::mem::take(&mut self.interrupted);
        // A write that failed because its event was written before has left no row.
        ids.retain(|id| !self.hot_path.as_ref().is_some_and(|hot_path| hot_path.has(id)));
        if ids.is_empty() || end == End::RolledBack {
            return;
        }
        if let Some(hot_path) = &self.hot_path {
            hot_path.release_interrupted(&self.table, ids, end == End::Committed);
        }
        self.table.committed();
    }
}

impl<S: Store> InTransaction<S> for Transaction<S> {
    fn connection(&mut self) -> &mut S::Connection {
        self.use_connection();
        self.open_connection()
    }

    fn begun_by_outbox(&mut self) -> Option<&mut Transaction<S>> {
        Some(self)
    }
}

impl<S: Store> Deref for Transaction<S> {
    type Target = S::Connection;

    fn deref(&self) -> &S::Connection {
        match &self.inner {
            Some(inner) => inner,
            None => panic!("{IN_USE}"),
        }
    }
}

impl<S: Store> DerefMut for Transaction<S> {
    fn deref_mut(&mut self) -> &mut S::Connection {
        self.connection()
    }
}

impl<S: Store> Drop for Transaction<S> {
    fn drop(&mut self) {
        // A commit that was dropped half way may have happened. An insert that still runs is rolled back at its end.
        let end = if self.inner.is_some() || self.insert.is_some() { End::RolledBack } else { End::Unknown };
        drop(self.inner.take());
        self.end(end);
    }
}

/// A future that runs to its end even if the caller drops it: the rest of it then runs as a task.
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

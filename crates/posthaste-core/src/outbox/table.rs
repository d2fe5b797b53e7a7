use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

use super::cursor::Cursor;
use super::ownership::Ownership;
use super::sweeper::Sweeper;
use super::{Mode, OpenError, OutboxItem, OutboxSource, Owner, Reader, Store};
use crate::event::next_id;
use crate::{Event, FaultKind, HotQueue, StoreError, Wakeup, heartbeat, lock};

/// How many claims and releases, and how many settlements, of all sources of a table run at once. The others wait without a
/// timeout: a statement that waits for its connection must not count as one that the database does not answer, or a slow
/// database with many channels would get a release for every claim, and become slower.
const STATEMENTS_AT_ONCE: usize = 4;

/// One outbox table, with the state of this process: its claims, its cursors and its wake-ups.
pub struct Table<S: Store>(Arc<Shared<S>>);

struct Shared<S: Store> {
    store: S,
    /// `None` if this process only writes.
    reader: Option<Reader>,
    lease: Duration,
    /// In single-node mode.
    ownership: Ownership,
    /// In the modes that lease rows: only one claim of suspects may be in flight, because one of them may crash the
    /// process.
    suspects: Arc<Semaphore>,
    claim_permits: Semaphore,
    settle_permits: Semaphore,
    /// By event type; the dispatcher's one cursor has the empty name, which no event type can have.
    cursors: Mutex<HashMap<String, Arc<Cursor>>>,
    open_sources: AtomicUsize,
    /// The hot queue of this process's dispatcher.
    hot_queue: OnceLock<HotQueue<OutboxItem>>,
    /// In ordered mode.
    sweeper: Sweeper,
    /// Signalled when other processes are to be notified.
    notify_others: Wakeup,
}

impl<S: Store> Clone for Table<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Store> Table<S> {
    /// Records the table's kind of reader, its mode with the rule for dead events, and the lease. Fails if different
    /// ones are recorded. In the modes that lease rows, a claimer decides by its own lease if that of another process
    /// has ended.
    pub async fn open(store: S, reader: Reader, lease: Duration) -> Result<Self, OpenError> {
        let recorded = store.register(reader, lease).await?;
        recorded.check(store.table(), reader, store.mode(), lease)?;
        Ok(Self::new(store, Some(reader), lease))
    }

    /// Fails as [`open`](Self::open) would, and records nothing.
    pub async fn check(store: &S, reader: Reader, lease: Duration) -> Result<(), OpenError> {
        match store.registered().await? {
            Some(recorded) => recorded.check(store.table(), reader, store.mode(), lease),
            None => Ok(()),
        }
    }

    /// For a process that only writes. Any kind of reader in any mode may read the table in other processes.
    pub fn for_writing(store: S) -> Self {
        Self::new(store, None, Duration::ZERO)
    }

    fn new(store: S, reader: Option<Reader>, lease: Duration) -> Self {
        Self(Arc::new(Shared {
            store,
            reader,
            lease,
            ownership: Ownership::new(next_id(), lease),
            suspects: Arc::new(Semaphore::new(1)),
            claim_permits: Semaphore::new(STATEMENTS_AT_ONCE),
            settle_permits: Semaphore::new(STATEMENTS_AT_ONCE),
            cursors: Mutex::default(),
            open_sources: AtomicUsize::new(0),
            hot_queue: OnceLock::new(),
            sweeper: Sweeper::new(),
            notify_others: Wakeup::default(),
        }))
    }

    /// Waits until a claim or a release may run. Nothing closes the semaphore.
    pub(super) async fn claim_permit(&self) -> Option<SemaphorePermit<'_>> {
        self.0.claim_permits.acquire().await.ok()
    }

    /// Waits until a settlement may run.
    pub(super) async fn settle_permit(&self) -> Option<SemaphorePermit<'_>> {
        self.0.settle_permits.acquire().await.ok()
    }

    /// True if both are clones of the same table.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The statements of the database.
    pub fn store(&self) -> &S {
        &self.0.store
    }

    /// The source of every event of the table.
    ///
    /// # Panics
    /// When the table was not opened for the dispatcher.
    pub fn dispatcher_source(&self) -> OutboxSource<S> {
        assert_eq!(
            self.0.reader,
            Some(Reader::Dispatcher),
            "outbox {} is not read by a dispatcher",
            self.0.store.table()
        );
        self.source("")
    }

    /// The source of the events of one type. In ordered mode all types have one source, because the order of an
    /// aggregate is that of all its events.
    ///
    /// # Panics
    /// When the table was not opened for channels.
    pub fn channel_source(&self, event_type: &str) -> OutboxSource<S> {
        assert_eq!(self.0.reader, Some(Reader::Channels), "outbox {} is not read by channels", self.0.store.table());
        self.source(self.cursor_name(event_type))
    }

    /// A source of events of this type whose claims no other source of this process knows.
    pub(crate) fn unshared_source(&self, event_type: &str) -> OutboxSource<S> {
        self.count_source();
        OutboxSource::new(self.clone(), Arc::new(Cursor::new(self.cursor_name(event_type), next_id())))
    }

    fn count_source(&self) {
        self.0.open_sources.fetch_add(1, Ordering::AcqRel);
        self.0.ownership.request();
    }

    fn source(&self, name: &str) -> OutboxSource<S> {
        self.count_source();
        let cursor = lock(&self.0.cursors)
            .entry(name.to_owned())
            .or_insert_with(|| Arc::new(Cursor::new(name, next_id())))
            .clone();
        OutboxSource::new(self.clone(), cursor)
    }

    /// Makes the source of events of this type claim now.
    pub fn wake(&self, event_type: &str) {
        if let Some(cursor) = self.cursor_of(event_type) {
            cursor.wakeup.wake();
        }
    }

    /// Call this after the commit of a transaction with events: every source claims now, also in other processes if the
    /// database can notify them.
    pub fn committed(&self) {
        self.wake_all();
        self.0.notify_others.wake();
    }

    /// Makes every source of this process claim now.
    pub(super) fn wake_all(&self) {
        lock(&self.0.cursors).values().for_each(|cursor| cursor.wakeup.wake());
    }

    /// Call this after writing events in a transaction whose commit the outbox cannot see.
    pub fn wrote<'a>(&self, events: impl IntoIterator<Item = &'a Event>) {
        for event_type in events.into_iter().map(Event::event_type).collect::<BTreeSet<_>>() {
            if let Some(cursor) = self.cursor_of(event_type) {
                cursor.wakeup.wake_soon();
            }
        }
        self.0.notify_others.wake_soon();
    }

    /// Signalled when other processes are to be notified.
    pub(super) fn notify_others(&self) -> &Wakeup {
        &self.0.notify_others
    }

    /// Event types with due rows, to find channels that are not open yet and rows that other processes inserted.
    pub async fn pending_types(&self) -> Result<Vec<String>, StoreError> {
        self.0.store.pending_types().await
    }

    /// No suspect is in flight any more: every source may claim the next ones.
    pub(super) fn suspects_settled(&self) {
        for cursor in lock(&self.0.cursors).values() {
            cursor.restart_scan();
            cursor.wakeup.wake();
        }
    }

    pub(super) fn suspects(&self) -> &Arc<Semaphore> {
        &self.0.suspects
    }

    pub(super) fn ownership(&self) -> &Ownership {
        &self.0.ownership
    }

    /// Single node: acquires or keeps the ownership of the table.
    ///
    /// It runs on a thread where no listener can delay it, and to its end: a caller whose thread is blocked half way
    /// must not keep a lock that the renewer needs.
    pub(super) async fn acquire_ownership(&self) -> Result<Owner, StoreError> {
        match self.0.ownership.fresh() {
            Some(generation) => Ok(Owner::Us { generation }),
            None => self.on_own_thread(|table| async move { table.0.ownership.acquire(&table.0.store).await }).await,
        }
    }

    /// Single node: lets another process take over at once.
    pub(super) async fn release_ownership(&self) -> Result<(), StoreError> {
        self.on_own_thread(|table| async move { table.0.ownership.release(&table.0.store).await }).await
    }

    async fn on_own_thread<T, F>(&self, task: impl FnOnce(Self) -> F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let task = task(self.clone());
        if !self.0.store.runs_on_own_thread() {
            return task.await;
        }
        let panicked = || StoreError::new("own the outbox", FaultKind::Transient, "the store panicked");
        heartbeat::run(task).await.unwrap_or_else(|| Err(panicked()))
    }

    pub(super) fn mode(&self) -> Mode {
        self.0.store.mode()
    }

    /// How long a claim lasts without a renewal.
    pub(super) fn lease(&self) -> Duration {
        match self.mode() {
            Mode::SingleNode => self.0.ownership.dependable_lease(),
            _ => self.0.lease,
        }
    }

    /// How long rows are leased.
    pub(super) fn row_lease(&self) -> Duration {
        self.0.lease
    }

    /// From now on, pre-claimed events go here.
    pub(super) fn set_hot_queue(&self, queue: HotQueue<OutboxItem>) {
        // A table has one dispatcher in a process; the queue of a second one is not used.
        let _ = self.0.hot_queue.set(queue);
    }

    /// The queue for pre-claimed events, and the cursor of the dispatcher that claims them.
    pub(super) fn hot_queue(&self) -> Option<(&HotQueue<OutboxItem>, Arc<Cursor>)> {
        let queue = self.0.hot_queue.get().filter(|_| self.mode().is_hot())?;
        Some((queue, lock(&self.0.cursors).get("")?.clone()))
    }

    pub(super) fn sweeper(&self) -> &Sweeper {
        &self.0.sweeper
    }

    /// Subtracts a source that has ended. True if it was the last.
    pub(super) fn leave(&self) -> bool {
        self.0.open_sources.fetch_sub(1, Ordering::AcqRel) == 1
    }

    fn cursor_of(&self, event_type: &str) -> Option<Arc<Cursor>> {
        lock(&self.0.cursors).get(self.cursor_name(event_type)).cloned()
    }

    /// The name of the cursor that claims events of this type.
    fn cursor_name<'a>(&self, event_type: &'a str) -> &'a str {
        match (self.0.reader, self.mode()) {
            (Some(Reader::Channels), mode) if !mode.is_ordered() => event_type,
            _ => "",
        }
    }
}

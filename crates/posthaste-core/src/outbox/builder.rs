use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::hook::WriterHook;
use super::{
    BadSetting, BadTableName, DeadHead, Interceptor, Listeners, Mode, OpenError, Outbox, Pool, Reader,
    RegistrationError, Retention, Settings, Store, Table, TableName, Unroutable,
};
use crate::trace::TraceContext;
use crate::{Event, Outcome, RetryPolicy};

/// Configures an [`Outbox`]. [`Outbox::new`] creates it, and [`start`](Self::start) starts the outbox.
pub struct OutboxBuilder<P, S> {
    pool: P,
    store: PhantomData<fn() -> S>,
    settings: Settings,
    listeners: Listeners,
    hook: Option<Arc<dyn WriterHook>>,
    trace: Option<Arc<dyn TraceContext>>,
    /// The first error, which `start` returns.
    wrong: Option<StartError>,
}

/// Why an outbox did not start; nothing runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting has an invalid value.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// The table cannot have this name.
    #[error(transparent)]
    Table(#[from] BadTableName),
    /// A listener cannot be registered.
    #[error(transparent)]
    Listener(#[from] RegistrationError),
    /// There is no listener to deliver to.
    #[error("no listener is registered: register one with listen, or choose the mode writer only")]
    NoListener,
    /// There are listeners in a process that delivers nothing.
    #[error(
        "listeners and interceptors are of no use to a process that only writes: remove them, or choose another mode"
    )]
    ListenersOfAWriter,
    /// The table cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl<S: Store, P: Pool<S>> OutboxBuilder<P, S> {
    pub(super) fn new(pool: P) -> Self {
        Self {
            pool,
            store: PhantomData,
            settings: Settings::default(),
            listeners: Listeners::new(),
            hook: None,
            trace: None,
            wrong: None,
        }
    }

    /// Sets all settings at once, for example from the service's config file.
    #[must_use]
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// See [`Settings::table`].
    #[must_use]
    pub fn table(mut self, name: impl Into<String>) -> Self {
        match TableName::new(name) {
            Ok(table) => self.settings.table = table,
            Err(error) => self.note(error),
        }
        self
    }

    /// See [`Mode`].
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.settings.mode = mode;
        self
    }

    /// [`Mode::Ordered`] in which a dead event blocks the later ones of its aggregate.
    #[must_use]
    pub fn ordered(self) -> Self {
        self.mode(Mode::Ordered(DeadHead::Block))
    }

    /// See [`Settings::workers`].
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.settings.workers = workers;
        self
    }

    /// See [`Settings::retry`].
    #[must_use]
    pub fn retry(mut self, retry: RetryPolicy) -> Self {
        self.settings.retry = retry;
        self
    }

    /// See [`Settings::poll_interval`].
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.settings.poll_interval = Some(interval);
        self
    }

    /// See [`Settings::lease`].
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// See [`Settings::unroutable`].
    #[must_use]
    pub fn unroutable(mut self, unroutable: Unroutable) -> Self {
        self.settings.unroutable = unroutable;
        self
    }

    /// See [`Settings::purge`].
    #[must_use]
    pub fn purge(mut self, retention: Retention) -> Self {
        self.settings.purge = Some(retention);
        self
    }

    /// Replaces all listeners that were registered here so far by others.
    #[must_use]
    pub fn listeners(mut self, listeners: Listeners) -> Self {
        self.listeners = listeners;
        self
    }

    /// Registers a listener that is given the payload as a `T`, for events that belong to no aggregate. See
    /// [`Listeners::on_json`].
    #[must_use]
    pub fn listen<T, F, R, O>(self, event_type: impl Into<String>, listener: F) -> Self
    where
        T: DeserializeOwned + Send,
        F: Fn(T, Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.register(|listeners| listeners.on_json(event_type, listener))
    }

    /// The same for events of aggregates of one type.
    #[must_use]
    pub fn listen_aggregate<T, F, R, O>(
        self,
        aggregate_type: impl Into<String>,
        event_type: impl Into<String>,
        listener: F,
    ) -> Self
    where
        T: DeserializeOwned + Send,
        F: Fn(T, Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.register(|listeners| listeners.on_aggregate_json(aggregate_type, event_type, listener))
    }

    /// Registers a listener that is given the event as it is. See [`Listeners::on`].
    #[must_use]
    pub fn on<F, R, O>(self, event_type: impl Into<String>, listener: F) -> Self
    where
        F: Fn(Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.register(|listeners| listeners.on(event_type, listener))
    }

    /// The same for events of aggregates of one type.
    #[must_use]
    pub fn on_aggregate<F, R, O>(
        self,
        aggregate_type: impl Into<String>,
        event_type: impl Into<String>,
        listener: F,
    ) -> Self
    where
        F: Fn(Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.register(|listeners| listeners.on_aggregate(aggregate_type, event_type, listener))
    }

    /// Adds an interceptor, which runs around every listener.
    #[must_use]
    pub fn intercept(mut self, interceptor: impl Interceptor) -> Self {
        self.listeners = self.listeners.intercept(interceptor);
        self
    }

    /// Sets the hook that runs around every write.
    #[must_use]
    pub fn hook(mut self, hook: impl WriterHook) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// Sets how traces are carried from the write of an event to its delivery.
    #[must_use]
    pub fn trace_context(mut self, trace: impl TraceContext) -> Self {
        self.trace = Some(Arc::new(trace));
        self
    }

    /// Opens the table and, unless this process only writes, starts to deliver.
    pub async fn start(self) -> Result<Outbox<S>, StartError> {
        let Self { pool, settings, listeners, hook, trace, wrong, .. } = self;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        settings.check()?;
        let is_writer = settings.mode == Mode::WriterOnly;
        if is_writer {
            settings.check_writer_only()?;
            if !listeners.is_empty() {
                return Err(StartError::ListenersOfAWriter);
            }
        } else if listeners.is_empty() {
            return Err(StartError::NoListener);
        }
        let store = pool.open(settings.table.clone(), settings.mode).await?;
        let table = match is_writer {
            true => Table::for_writing(store),
            false => Table::open(store, Reader::Dispatcher, settings.lease).await?,
        };
        Ok(Outbox::start(table, settings, listeners, hook, trace))
    }

    fn register(mut self, register: impl FnOnce(Listeners) -> Result<Listeners, RegistrationError>) -> Self {
        match register(self.listeners.clone()) {
            Ok(listeners) => self.listeners = listeners,
            Err(error) => self.note(error),
        }
        self
    }

    fn note(&mut self, wrong: impl Into<StartError>) {
        self.wrong.get_or_insert(wrong.into());
    }
}

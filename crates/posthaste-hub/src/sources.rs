//! The outbox tables in the databases of services. Each has a task that opens it, searches it and reports its health, so a
//! source that is down stops no other.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use posthaste_api::{SourceList, SourceOut, SourceState};
use posthaste_core::hub_store::SourceDatabase;
use posthaste_core::metric_names::{SOURCE_LAG_OLDEST, SOURCE_UP};
use posthaste_core::outbox::OpenError;
use posthaste_core::{Backoff, lock};
use tokio::time::{sleep, timeout};

use crate::channels::{Channels, LOOK_TIMEOUT, TableChannels};
use crate::retention::Expiring;
use crate::settings::{Settings, SourceSettings};

/// The pauses between attempts to reach a source that is down.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long an operator's list waits for the count of a source's pending events, and how far it counts.
const COUNT_TIMEOUT: Duration = Duration::from_secs(2);
const COUNT_LIMIT: usize = 10_000;

/// A source that a hub is to read.
pub struct SourcePart {
    pub settings: SourceSettings,
    pub database: Arc<dyn SourceDatabase>,
    /// The address of the database, without a password.
    pub database_name: String,
}

/// The sources of a hub.
#[derive(Clone, Default)]
pub(crate) struct Sources(Arc<Vec<Arc<Source>>>);

struct Source {
    name: Arc<str>,
    part: SourcePart,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// True if this process reads it.
    is_read: bool,
    is_up: bool,
    /// Why it is down.
    error: Option<String>,
    table: Option<TableChannels>,
}

/// The name of a source's task in logs and readiness.
fn task_name(source: &str) -> String {
    format!("source:{source}")
}

impl Sources {
    pub(crate) fn new(parts: Vec<SourcePart>) -> Self {
        let source = |part: SourcePart| {
            Arc::new(Source { name: part.settings.name.as_str().into(), part, state: Mutex::default() })
        };
        Self(Arc::new(parts.into_iter().map(source).collect()))
    }

    /// Starts to read every source that is enabled.
    pub(crate) fn start(&self, channels: &Channels) {
        for source in self.0.iter().filter(|source| source.part.settings.enabled) {
            lock(&source.state).is_read = true;
            let (source, channels) = (source.clone(), channels.clone());
            let supervisor = channels.relays().supervisor().clone();
            supervisor.spawn(task_name(&source.name), move || source.clone().run(channels.clone()));
        }
    }

    /// The parts of readiness that are not ready: the sources that are down, and why.
    pub(crate) fn down(&self) -> Vec<(String, String)> {
        let down = |source: &Arc<Source>| Some((task_name(&source.name), lock(&source.state).error.clone()?));
        self.0.iter().filter_map(down).collect()
    }

    /// The relays whose oldest event has been due for longer than this, of the sources that are up.
    pub(crate) fn late_relays(&self, age: Duration) -> Vec<String> {
        let up = |source: &Arc<Source>| {
            let state = lock(&source.state);
            state.table.clone().filter(|_| state.is_up)
        };
        self.0.iter().filter_map(up).flat_map(|table| table.late_relays(age)).collect()
    }

    /// Sets the gauges of the sources that this process reads.
    pub(crate) fn measure(&self) {
        for source in self.0.iter().filter(|source| lock(&source.state).is_read) {
            let is_up = lock(&source.state).is_up;
            let lag = source.lag().unwrap_or_default();
            metrics::gauge!(SOURCE_UP, "source" => source.name.to_string()).set(if is_up { 1.0 } else { 0.0 });
            metrics::gauge!(SOURCE_LAG_OLDEST, "source" => source.name.to_string()).set(lag.as_millis() as f64);
        }
    }

    /// What an operator sees of the sources.
    pub(crate) async fn list(&self) -> SourceList {
        SourceList { items: join_all(self.0.iter().map(|source| source.show())).await }
    }

    /// Closes the connections of all sources.
    pub(crate) async fn close(&self) {
        join_all(self.0.iter().map(|source| source.part.database.close())).await;
    }
}

impl Source {
    /// Opens the table, then searches it, until the hub stops.
    async fn run(self: Arc<Self>, channels: Channels) {
        let stopping = channels.relays().stopping().clone();
        let settings = channels.settings().clone();
        let interval = self.interval(&settings);
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let looked = tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                looked = timeout(LOOK_TIMEOUT, self.look(&channels, &settings)) => looked,
            };
            let pause = match looked.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) {
                Ok(()) => {
                    backoff.reset();
                    self.set_up();
                    interval
                }
                Err(error) => {
                    self.set_down(error);
                    backoff.next_pause()
                }
            };
            tokio::select! {
                biased;
                () = stopping.cancelled() => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Opens the table if it is not open, and searches it.
    async fn look(&self, channels: &Channels, settings: &Settings) -> Result<(), String> {
        let opened = lock(&self.state).table.clone();
        let table = match opened {
            Some(table) => table,
            None => {
                let outbox =
                    self.part.database.open(settings.outbox.lease).await.map_err(|error| source_error(&error))?;
                let batch_size = self.part.settings.batch_size.unwrap_or(settings.outbox.batch_size);
                if let Some(age) = settings.retention.outbox {
                    let task = format!("{}-retention", task_name(&self.name));
                    Expiring::outbox(outbox.clone(), age).start_as(task, channels.relays().supervisor());
                }
                let table = channels.add_table(outbox, Some(self.name.clone()), batch_size, self.interval(settings));
                lock(&self.state).table = Some(table.clone());
                table
            }
        };
        match table.search().await {
            Ok(()) => Ok(()),
            // The pool says only that it found no connection. A connection of its own says why.
            Err(error) => match self.part.database.check().await {
                Ok(()) => Err(error.chain()),
                Err(unreachable) => Err(source_error(&unreachable)),
            },
        }
    }

    fn interval(&self, settings: &Settings) -> Duration {
        self.part.settings.poll_interval.unwrap_or(settings.shortest_interval())
    }

    fn set_up(&self) {
        let (was_up, table) = {
            let mut state = lock(&self.state);
            state.error = None;
            (std::mem::replace(&mut state.is_up, true), state.table.clone())
        };
        if let Some(table) = table {
            table.set_down(false);
        }
        if !was_up {
            tracing::info!(source = &*self.name, "the source is up");
        }
    }

    fn set_down(&self, error: String) {
        let (before, table) = {
            let mut state = lock(&self.state);
            state.is_up = false;
            (state.error.replace(error.clone()), state.table.clone())
        };
        if let Some(table) = table {
            table.set_down(true);
        }
        if before.as_ref() != Some(&error) {
            tracing::error!(source = &*self.name, error, "the source cannot be read; trying again until it can");
        }
    }

    /// For how long the oldest event had been due at the last look.
    fn lag(&self) -> Option<Duration> {
        let table = lock(&self.state).table.clone()?;
        Some(table.lags().into_iter().map(|(_, lag)| lag).max().unwrap_or_default())
    }

    async fn show(&self) -> SourceOut {
        let SourceSettings { name, table, mode, enabled, .. } = self.part.settings.clone();
        let (is_read, mut is_up, mut last_error, opened) = {
            let state = lock(&self.state);
            (state.is_read, state.is_up, state.error.clone(), state.table.clone())
        };
        if enabled && !is_read {
            // Another server reads it. This one can only say whether it can be reached.
            let checked = timeout(COUNT_TIMEOUT, self.part.database.check()).await;
            last_error = match checked {
                Ok(reached) => reached.err().map(|error| source_error(&error)),
                Err(_) => Some("it did not answer in time".to_owned()),
            };
            is_up = last_error.is_none();
        }
        let pending = match opened.filter(|_| is_up) {
            Some(opened) => {
                timeout(COUNT_TIMEOUT, async { opened.outbox().count_pending(COUNT_LIMIT).await.map(Some) }).await
            }
            None => Ok(Ok(None)),
        };
        SourceOut {
            name,
            database: self.part.database_name.clone(),
            table: table.to_string(),
            mode,
            status: match (enabled, is_up) {
                (false, _) => SourceState::Paused,
                (true, true) => SourceState::Up,
                (true, false) => SourceState::Down,
            },
            pending: pending.ok().and_then(Result::ok).flatten(),
            lag_seconds: self.lag().filter(|_| is_up).map(|lag| lag.as_secs_f64()),
            last_error,
        }
    }
}

/// Why a source cannot be read, and what to do.
pub fn source_error(error: &OpenError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    let is_denied = ["permission denied", "command denied"].iter().any(|denied| text.contains(denied));
    match error {
        _ if is_denied => format!("{text}; the user of the URL needs the rights that docs/sources.md lists"),
        OpenError::OldSchema { .. } => format!("{text}, for example with `posthaste sources migrate`"),
        _ => text,
    }
}

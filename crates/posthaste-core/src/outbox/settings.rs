use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Mode, Retention, TableName};
use crate::{OnStop, RelayOptions, RetryPolicy, millis};

/// How often an idle table is polled if the database notifies of writes, and if it cannot. Without notifications, an
/// event that another process leaves undelivered at a clean stop is still delivered within a second.
const POLL_WITH_NOTIFY: Duration = Duration::from_secs(5);
const POLL_WITHOUT_NOTIFY: Duration = Duration::from_millis(500);

/// How an outbox runs. Data, so that a service can keep it in its own config file; there all times are milliseconds,
/// and absent settings have their defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The outbox table. Default: `outbox_event`.
    pub table: TableName,
    /// Default: single node.
    pub mode: Mode,
    /// How many listeners run at once. Default: 4. With 0 nothing is delivered: for tests.
    pub workers: usize,
    /// How many events may go straight from a commit to the listeners and not be settled yet. Further events are
    /// claimed from the table. Default: 1000.
    pub hot_queue: usize,
    /// How many events may be claimed from the table and not yet settled. Default: 1000.
    pub cold_queue: usize,
    /// How many events are claimed at once. Default: 500; a full batch is followed by the next at once.
    pub batch_size: usize,
    /// How often an idle table is polled without a wake-up. Default: 5 s if the database notifies of writes, as
    /// PostgreSQL does, else 500 ms.
    #[serde(with = "millis::optional")]
    pub poll_interval: Option<Duration>,
    /// Rows younger than this are not claimed from the table. Default: 0.
    #[serde(with = "millis")]
    pub skip_recent: Duration,
    /// How long a claim lasts without a renewal; the same in all processes that read the table. Default: 30 s.
    #[serde(with = "millis")]
    pub lease: Duration,
    /// How long [`close`](super::Outbox::close) waits for running and queued events. Default: 5 s.
    #[serde(with = "millis")]
    pub drain: Duration,
    /// Default: 10 attempts, 200 ms doubled up to 60 s.
    pub retry: RetryPolicy,
    /// What happens to an event that has no listener in this process. Default: dead at once.
    pub unroutable: Unroutable,
    /// When finished events are deleted. Default: never.
    pub purge: Option<Retention>,
    /// The prefix of the names of metrics. Default: `posthaste`.
    pub metrics_prefix: String,
}

/// What happens to an event that has no listener in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Unroutable {
    /// It is dead at once.
    #[default]
    Dead,
    /// It is left for other processes until it is this old, then it is dead: for rolling deployments, which bring a new
    /// listener to one process after the other.
    Leave {
        /// How old it may become.
        #[serde(with = "millis")]
        grace: Duration,
    },
}

/// A setting with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("setting {setting} is {value}: {remedy}")]
pub struct BadSetting {
    setting: &'static str,
    value: String,
    remedy: &'static str,
}

impl BadSetting {
    pub(super) fn new(setting: &'static str, value: impl ToString, remedy: &'static str) -> Self {
        Self { setting, value: value.to_string(), remedy }
    }

    /// The name of the setting.
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            table: TableName::default(),
            mode: Mode::SingleNode,
            workers: 4,
            hot_queue: 1_000,
            cold_queue: 1_000,
            batch_size: 500,
            poll_interval: None,
            skip_recent: Duration::ZERO,
            lease: Duration::from_secs(30),
            drain: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            unroutable: Unroutable::Dead,
            purge: None,
            metrics_prefix: "posthaste".to_owned(),
        }
    }
}

impl Settings {
    pub(super) fn check(&self) -> Result<(), BadSetting> {
        let positive = |setting, value: usize| match value {
            0 => Err(BadSetting::new(setting, 0, "give at least 1")),
            _ => Ok(()),
        };
        let some_time = |setting, value: Duration| match value.is_zero() {
            true => Err(BadSetting::new(setting, "0", "give a positive duration")),
            false => Ok(()),
        };
        positive("hot_queue", self.hot_queue)?;
        positive("cold_queue", self.cold_queue)?;
        positive("batch_size", self.batch_size)?;
        some_time("poll_interval", self.poll_interval.unwrap_or(POLL_WITH_NOTIFY))?;
        if self.lease < Duration::from_secs(1) {
            let remedy = "give at least 1 s, better 30 s: a claim is renewed three times within it";
            return Err(BadSetting::new("lease", format!("{:?}", self.lease), remedy));
        }
        if let Some(retention) = &self.purge {
            retention.check()?;
        }
        self.check_retry()?;
        let prefix = &self.metrics_prefix;
        let starts_well = prefix.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
        match starts_well && prefix.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            true => Ok(()),
            false => Err(BadSetting::new(
                "metrics_prefix",
                format!("{prefix:?}"),
                "give letters, digits and _ that do not start with a digit",
            )),
        }
    }

    fn check_retry(&self) -> Result<(), BadSetting> {
        if self.retry.max_attempts() == Some(0) {
            return Err(BadSetting::new("retry.max_attempts", 0, "give at least 1: the first delivery is one"));
        }
        match self.retry {
            RetryPolicy::Exponential { base, max, .. } if base.is_zero() || max.is_zero() => {
                Err(BadSetting::new("retry.base or retry.max", "0", "give a positive duration"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses settings that a process that only writes would ignore.
    pub(super) fn check_writer_only(&self) -> Result<(), BadSetting> {
        let default = Self::default();
        let of_the_dispatcher = [
            ("workers", self.workers != default.workers),
            ("hot_queue", self.hot_queue != default.hot_queue),
            ("cold_queue", self.cold_queue != default.cold_queue),
            ("batch_size", self.batch_size != default.batch_size),
            ("poll_interval", self.poll_interval != default.poll_interval),
            ("skip_recent", self.skip_recent != default.skip_recent),
            ("lease", self.lease != default.lease),
            ("drain", self.drain != default.drain),
            ("retry", self.retry != default.retry),
            ("unroutable", self.unroutable != default.unroutable),
        ];
        match of_the_dispatcher.into_iter().find(|(_, is_set)| *is_set) {
            Some((setting, _)) => Err(BadSetting::new(setting, "set", "a process that only writes has no dispatcher")),
            None => Ok(()),
        }
    }

    pub(super) fn effective_poll_interval(&self, has_notify: bool) -> Duration {
        self.poll_interval.unwrap_or(if has_notify { POLL_WITH_NOTIFY } else { POLL_WITHOUT_NOTIFY })
    }

    pub(super) fn relay_options(&self, poll_interval: Duration) -> RelayOptions {
        RelayOptions {
            workers: self.workers,
            // One at a time for each worker: an event never waits for a slow one while another worker is free.
            chunk: 1,
            batch: self.batch_size,
            max_in_flight: self.cold_queue,
            poll_interval,
            retry: self.retry.clone(),
            // Settling is not urgent, and every transaction waits for the disk, so few transactions settle many events
            // each. What a crash may repeat stays far below a tenth of a second.
            settle_linger: Duration::from_millis(10),
            drain: self.drain,
            on_stop: OnStop::Deliver,
            metrics_prefix: self.metrics_prefix.clone(),
            ..RelayOptions::default()
        }
    }
}

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::settings::BadSetting;
use super::{OperatorStore, Purge};
use crate::{StoreError, millis};

/// When rows are deleted. Pending rows never are, except by `everything`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retention {
    /// How long delivered events are kept. Default: 7 days.
    #[serde(with = "millis::optional")]
    pub done: Option<Duration>,
    /// How long dead events are kept. Default: for ever, because an operator may still want them.
    #[serde(with = "millis::optional")]
    pub dead: Option<Duration>,
    /// How long any event is kept, whatever its status: for tables that another tool reads. Default: for ever.
    #[serde(with = "millis::optional")]
    pub everything: Option<Duration>,
    /// How many rows are deleted in one transaction. Default: 500.
    pub batch_size: usize,
    /// How often the purge runs. Default: once an hour.
    #[serde(with = "millis")]
    pub interval: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            done: Some(Duration::from_secs(7 * 24 * 60 * 60)),
            dead: None,
            everything: None,
            batch_size: 500,
            interval: Duration::from_secs(60 * 60),
        }
    }
}

impl Retention {
    pub(super) fn check(&self) -> Result<(), BadSetting> {
        if self.batch_size == 0 {
            return Err(BadSetting::new("purge.batch_size", 0, "give at least 1"));
        }
        match self.interval.is_zero() {
            true => Err(BadSetting::new("purge.interval", "0", "give a positive duration")),
            false => Ok(()),
        }
    }

    /// Deletes rows that are old enough, batch by batch, each in a transaction of its own. Returns how many rows.
    pub(super) async fn enforce(&self, store: &(impl OperatorStore + Sync)) -> Result<u64, StoreError> {
        let mut purged = 0;
        for (what, kept) in [(Purge::Done, self.done), (Purge::Dead, self.dead), (Purge::Everything, self.everything)] {
            let Some(kept) = kept else { continue };
            loop {
                let batch = store.purge(what, kept, self.batch_size).await?;
                purged += batch;
                if batch < self.batch_size as u64 {
                    break;
                }
            }
        }
        Ok(purged)
    }

    /// Purges at every interval, until `stop`. A failed purge does not end the schedule.
    pub(super) async fn keep(self, store: &(impl OperatorStore + Sync), stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                purged = self.enforce(store) => match purged {
                    Ok(0) => {}
                    Ok(rows) => tracing::info!(rows, "purged old events"),
                    Err(error) => tracing::warn!(error = error.chain(), "failed to purge old events; trying later"),
                },
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = sleep(self.interval) => {}
            }
        }
    }
}

use std::time::Duration;

use posthaste_core::StoreError;

use crate::Hub;

/// The relays that read the bus, by the names of their groups.
const GROUPS: [&str; 3] = ["event-processor", "outbox-processor", "dlt-intake"];

impl Hub {
    /// Sets the gauge that says for each relay how long the oldest item that is due has been waiting.
    pub async fn measure_lag(&self) -> Result<(), StoreError> {
        let channels = self.database.lag_of_channels().await?;
        let channels = channels.into_iter().map(|(event_type, lag)| (format!("channel:{event_type}"), lag));
        let mut lags: Vec<(String, Duration)> = channels.collect();
        lags.extend(self.log.lag_of_groups().await?);
        lags.extend(self.letters.oldest_due().await?.map(|lag| ("dlt-retry".to_owned(), lag)));

        // What has caught up since the last look is back at 0.
        let mut lagging = self.lagging.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = GROUPS.into_iter().chain(["dlt-retry"]).map(str::to_owned).chain(lagging.drain());
        known.for_each(|relay| set(relay, Duration::ZERO));
        for (relay, lag) in lags {
            lagging.insert(relay.clone());
            set(relay, lag);
        }
        Ok(())
    }
}

fn set(relay: String, lag: Duration) {
    metrics::gauge!("posthaste_lag_oldest_ms", "relay" => relay).set(lag.as_millis() as f64);
}

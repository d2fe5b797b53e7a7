use std::time::Duration;

use posthaste_core::metric_names::HUB_LAG_OLDEST;
use posthaste_core::{StoreError, lock};

use crate::Hub;
use crate::channels::relay_name;
use crate::hub::{DLT_INTAKE, DLT_RETRY, EVENT_PROCESSOR, OUTBOX_PROCESSOR};

/// The relays that always have a gauge. Channels have a gauge only while they have a lag.
const ALWAYS: [&str; 4] = [EVENT_PROCESSOR, OUTBOX_PROCESSOR, DLT_INTAKE, DLT_RETRY];

impl Hub {
    /// Sets the gauge that shows for each relay how long its oldest due item has been waiting.
    pub async fn measure_lag(&self) -> Result<(), StoreError> {
        let channels = self.channels.lags().into_iter();
        let channels = channels.map(|(event_type, lag)| (relay_name(None, &event_type), lag));
        let mut lags: Vec<(String, Duration)> = channels.collect();
        self.sources.measure();
        lags.extend(self.stores.inspector.lag_of_groups().await?);
        lags.extend(self.stores.dead_letters.oldest_due().await?.map(|lag| (DLT_RETRY.to_owned(), lag)));

        // A relay that has caught up since the last measurement is set to 0.
        let mut lagging = lock(&self.lagging);
        let known = ALWAYS.into_iter().map(str::to_owned).chain(lagging.drain());
        known.for_each(|relay| set(relay, Duration::ZERO));
        for (relay, lag) in lags {
            lagging.insert(relay.clone());
            set(relay, lag);
        }
        Ok(())
    }
}

fn set(relay: String, lag: Duration) {
    metrics::gauge!(HUB_LAG_OLDEST, "relay" => relay).set(lag.as_millis() as f64);
}

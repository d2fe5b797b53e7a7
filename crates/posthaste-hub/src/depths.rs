use std::time::Duration;

use posthaste_core::hub_store::QuarantineCount;
use posthaste_core::metric_names::{BACKLOG, DLT_DEPTH, QUARANTINED};
use posthaste_core::{FaultKind, StoreError};
use tokio::time::timeout;

use crate::Hub;

/// The other metrics do not wait longer for a bus that is away.
const BUS_TIMEOUT: Duration = Duration::from_secs(2);

impl Hub {
    /// Sets the gauges that are read from the database: dead letters and quarantined records.
    pub async fn measure_depths(&self) -> Result<(), StoreError> {
        for (status, count) in self.dead_letter_depth().await? {
            metrics::gauge!(DLT_DEPTH, "status" => status.as_str()).set(count as f64);
        }
        for QuarantineCount { group, topic, records } in self.stores.quarantine.counts().await? {
            metrics::gauge!(QUARANTINED, "group" => group, "topic" => topic).set(records as f64);
        }
        Ok(())
    }

    /// Sets the gauges of the backlogs, which are read from the bus.
    pub async fn measure_backlogs(&self) -> Result<(), StoreError> {
        let topics = self.stores.inspector.topics();
        let late = |late| StoreError::new("ask the bus about topics", FaultKind::Transient, late);
        for topic in timeout(BUS_TIMEOUT, topics).await.map_err(late)?? {
            for (group, watermark) in topic.groups {
                let backlog = (topic.next_offset - watermark).max(0);
                let labels =
                    [("group", group), ("topic", topic.topic.clone()), ("partition", topic.partition.to_string())];
                metrics::gauge!(BACKLOG, &labels).set(backlog as f64);
            }
        }
        Ok(())
    }
}

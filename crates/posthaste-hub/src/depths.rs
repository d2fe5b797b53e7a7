use posthaste_core::StoreError;
use posthaste_core::hub_store::QuarantineCount;
use posthaste_core::metric_names::{BACKLOG, DLT_DEPTH, QUARANTINED};

use crate::Hub;

impl Hub {
    /// Sets the gauges that are read from the database: backlogs, dead letters and quarantined records.
    pub async fn measure_depths(&self) -> Result<(), StoreError> {
        for (status, count) in self.dead_letter_depth().await? {
            metrics::gauge!(DLT_DEPTH, "status" => status.as_str()).set(count as f64);
        }
        for topic in self.stores.inspector.topics().await? {
            for (group, watermark) in topic.groups {
                let backlog = (topic.next_offset - watermark).max(0);
                let labels =
                    [("group", group), ("topic", topic.topic.clone()), ("partition", topic.partition.to_string())];
                metrics::gauge!(BACKLOG, &labels).set(backlog as f64);
            }
        }
        for QuarantineCount { group, topic, records } in self.stores.quarantine.counts().await? {
            metrics::gauge!(QUARANTINED, "group" => group, "topic" => topic).set(records as f64);
        }
        Ok(())
    }
}

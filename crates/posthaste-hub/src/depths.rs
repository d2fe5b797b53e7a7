use posthaste_core::StoreError;

use crate::Hub;

impl Hub {
    /// Sets the gauges that are read from the database: how much waits, and how many letters there are.
    pub async fn measure_depths(&self) -> Result<(), StoreError> {
        for (status, count) in self.dead_letter_depth().await? {
            metrics::gauge!("posthaste_dlt_depth", "status" => status.as_str()).set(count as f64);
        }
        for topic in self.log.topics().await? {
            for (group, watermark) in topic.groups {
                let backlog = (topic.next_offset - watermark).max(0);
                let labels =
                    [("group", group), ("topic", topic.topic.clone()), ("partition", topic.partition.to_string())];
                metrics::gauge!("posthaste_backlog", &labels).set(backlog as f64);
            }
        }
        metrics::gauge!("posthaste_quarantined").set(self.log.quarantined_count().await? as f64);
        Ok(())
    }
}

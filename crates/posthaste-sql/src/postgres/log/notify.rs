use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::log::AppendNotifier;

use super::LogTables;
use crate::postgres::notify;

/// The channel of LISTEN and NOTIFY. A channel belongs to one database.
const CHANNEL: &str = "posthaste_log";

/// The longest payload. PostgreSQL accepts nearly 8,000 bytes, but the queue that all channels share has a limit.
const MAX_PAYLOAD: usize = 1_000;

#[async_trait]
impl AppendNotifier for LogTables {
    async fn notify(&self, topics: &[Arc<str>]) -> Result<(), StoreError> {
        let notify = sqlx::query(notify::NOTIFY).bind(CHANNEL).bind(payload(topics));
        self.run("notify other processes", notify).await.map(|_| ())
    }

    async fn listen(&self, appended: &(dyn Fn(Option<Vec<String>>) + Send + Sync)) -> Result<(), StoreError> {
        notify::listen(&self.pool, CHANNEL, |payload| appended(payload.and_then(topics))).await
    }
}

/// The topics as JSON, or nothing if that would be too long: then every consumer is woken.
fn payload(topics: &[Arc<str>]) -> String {
    let topics: Vec<&str> = topics.iter().map(|topic| &**topic).collect();
    serde_json::to_string(&topics).ok().filter(|json| json.len() <= MAX_PAYLOAD).unwrap_or_default()
}

fn topics(payload: &str) -> Option<Vec<String>> {
    serde_json::from_str(payload).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_that_would_be_too_long_means_every_topic() {
        let few: [Arc<str>; 2] = ["a \"quoted\" topic".into(), "b".into()];
        assert_eq!(topics(&payload(&few)).unwrap(), ["a \"quoted\" topic", "b"]);
        let many: Vec<Arc<str>> = (0..500).map(|number| format!("topic {number}").into()).collect();
        assert_eq!((payload(&many).as_str(), topics(&payload(&many))), ("", None));
    }
}

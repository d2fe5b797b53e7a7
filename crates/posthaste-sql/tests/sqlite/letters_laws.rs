//! The laws of a source, on the dead letters of the hub.

use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::Source;
use posthaste_sql::letters::Letter;
use posthaste_sql::sqlite::Letters;
use posthaste_testing::source_laws::SourceHarness;

use crate::support::{File, letter};

struct LettersHarness {
    file: File,
    lease: Duration,
    writer: Letters,
}

impl LettersHarness {
    async fn start(lease: Duration) -> Self {
        let file = File::new();
        let database = file.open().await;
        database.migrate_hub().await.unwrap();
        Self { file, lease, writer: Letters::new(database, lease) }
    }
}

#[async_trait]
impl SourceHarness for LettersHarness {
    type Source = Letters;

    async fn open(&self) -> Letters {
        Letters::new(self.file.open().await, self.lease)
    }

    async fn insert(&self, label: &str, delay: Duration) {
        let mut letter = letter(label);
        letter.first_delay = Some(delay);
        self.writer.intake(vec![letter]).await.unwrap();
    }

    fn label(&self, item: &<Letters as Source>::Item) -> String {
        let Letter { event_id, .. } = item;
        event_id.trim_start_matches("event-").to_owned()
    }
}

posthaste_testing::source_laws!(LettersHarness::start);

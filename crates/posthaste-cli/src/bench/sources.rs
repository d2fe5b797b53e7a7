use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthaste_api::SourceList;
use posthaste_core::Event;
use posthaste_core::outbox::{Mode, TableName};
use posthaste_sql::sqlite::Database;

use super::server::Server;
use super::{Figure, rate};
use crate::client::Client;

/// How many events are inserted at once.
const BATCH: usize = 500;
const POLL: Duration = Duration::from_millis(20);

/// A server that publishes the same number of events from 1, 10 and 100 SQLite sources to the built-in bus, and is idle
/// afterwards.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let events = if quick { 10_000 } else { 100_000 };
    let mut figures = Vec::new();
    for count in [1, 10, 100] {
        let folder = tempfile::tempdir()?;
        fill(folder.path(), count, events).await?;
        let started = Instant::now();
        let (server, _) = Server::start(folder.path())?;
        let client = Client::new(server.url())?;
        while !is_done(&client.sources().await?) {
            tokio::time::sleep(POLL).await;
        }
        let took = started.elapsed();
        let window = Duration::from_secs(if quick { 3 } else { 15 });
        let cpu = server.idle_cpu(window).await?;
        let what = format!("from {count} sources to the bus");
        figures.push(Figure::new("sources", what, rate(events, took), "events/s"));
        figures.push(Figure::new("sources", format!("idle CPU of one core, {count} sources"), cpu, "%"));
        let memory = server.resident_megabytes()?;
        figures.push(Figure::new("sources", format!("memory, {count} sources"), memory, "MB"));
    }
    Ok(figures)
}

/// The configuration of this many sources, and their files with events.
async fn fill(folder: &Path, count: usize, events: usize) -> anyhow::Result<()> {
    let mut config = "[telemetry]\nlog = 'error'\n".to_owned();
    let payload = format!("{{\"text\":\"{}\"}}", "x".repeat(220));
    for number in 0..count {
        let url = format!("sqlite://{}", folder.join(format!("source-{number}.db")).display());
        config.push_str(&format!("[[sources]]\nname = 'source-{number}'\nurl = '{url}'\n"));
        let database = Database::open(&url).await?;
        let store = database.outbox(TableName::default(), Mode::MultiNode).await?;
        let mut left = events / count;
        while left > 0 {
            let event = |_| Ok(Arc::new(Event::text("bench.happened", payload.clone()).build()?));
            let batch = (0..left.min(BATCH)).map(event).collect::<anyhow::Result<Vec<_>>>()?;
            left -= batch.len();
            store.ingest(batch).await?;
        }
        database.close().await;
    }
    std::fs::write(folder.join("posthaste.toml"), config)?;
    Ok(())
}

fn is_done(sources: &SourceList) -> bool {
    sources.items.iter().all(|source| source.pending == Some(0))
}

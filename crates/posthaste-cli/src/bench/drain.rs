use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use posthaste_core::outbox::{Mode, Outbox, TableName};
use posthaste_sql::sqlite::{Database, probe};
use tokio::sync::Notify;

use super::{Figure, rate};

/// A backlog in SQLite, with status marks, synced to disk.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let count = if quick { 20_000 } else { 200_000 };
    let folder = tempfile::tempdir()?;
    let database = Database::open(&format!("sqlite://{}", folder.path().join("drain.db").display())).await?;

    let raw_table = TableName::new("raw_outbox")?;
    database.outbox(raw_table.clone(), Mode::SingleNode).await?;
    probe::fill_outbox(&database, &raw_table, count).await?;
    let started = Instant::now();
    let drained = probe::drain_outbox(&database, &raw_table, 500).await?;
    let raw = rate(drained, started.elapsed());

    let table = TableName::new("our_outbox")?;
    database.outbox(table.clone(), Mode::SingleNode).await?;
    probe::fill_outbox(&database, &table, count).await?;
    let ours = drain(&database, &table, count).await?;
    database.close().await;
    let figure = Figure::new("drain", format!("{count} rows of SQLite to a listener, all DONE"), ours, "events/s");
    Ok(vec![figure.raw("read 500, mark 500, repeat", raw)])
}

async fn drain(database: &Database, table: &TableName, count: usize) -> anyhow::Result<f64> {
    let heard = Arc::new((AtomicUsize::new(0), Notify::new()));
    let seen = heard.clone();
    let started = Instant::now();
    let outbox = Outbox::new(database.clone()).table(table.as_str()).on("bench.drained", move |_| {
        let seen = seen.clone();
        async move {
            if seen.0.fetch_add(1, Ordering::Relaxed) + 1 == count {
                seen.1.notify_one();
            }
        }
    });
    let outbox = outbox.start().await?;
    heard.1.notified().await;
    // Stopping records what is still to be recorded: it belongs to the work.
    outbox.close().await;
    let took = started.elapsed();
    anyhow::ensure!(outbox.table().pending_types().await?.is_empty(), "not every row is done");
    anyhow::ensure!(heard.0.load(Ordering::Relaxed) == count, "an event was delivered twice");
    Ok(rate(count, took))
}

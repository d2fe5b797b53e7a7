use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use posthaste_core::Event;
use posthaste_core::outbox::{Mode, Outbox, TableName};
use posthaste_sql::sqlite::Database;
use tokio::sync::Notify;

use super::{Figure, rate};

/// How many events are inserted at once.
const BATCH: usize = 1_000;

/// A backlog in SQLite, every settlement synced to disk. `cargo bench -p posthaste` compares it with plain SQL.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let count = if quick { 20_000 } else { 200_000 };
    let folder = tempfile::tempdir()?;
    let database = Database::open(&format!("sqlite://{}", folder.path().join("drain.db").display())).await?;

    let table = TableName::default();
    let store = database.outbox(table.clone(), Mode::SingleNode).await?;
    let filler = "x".repeat(220);
    for batch in 0..count / BATCH {
        let event = |number: usize| {
            let payload = format!(r#"{{"number":{number},"text":"{filler}"}}"#);
            Ok(Arc::new(Event::text("bench.drained", payload).build()?))
        };
        let events = (batch * BATCH..(batch + 1) * BATCH).map(event).collect::<anyhow::Result<_>>()?;
        store.ingest(events).await?;
    }
    let ours = drain(&database, &table, count).await?;
    database.close().await;
    Ok(vec![Figure::new("drain", format!("{count} rows of SQLite to a listener, all DONE"), ours, "events/s")])
}

async fn drain(database: &Database, table: &TableName, count: usize) -> anyhow::Result<f64> {
    let delivered = Arc::new((AtomicUsize::new(0), Notify::new()));
    let counter = delivered.clone();
    let started = Instant::now();
    let outbox = Outbox::new(database.clone()).table(table.as_str()).on("bench.drained", move |_| {
        let counter = counter.clone();
        async move {
            if counter.0.fetch_add(1, Ordering::Relaxed) + 1 == count {
                counter.1.notify_one();
            }
        }
    });
    let outbox = outbox.start().await?;
    delivered.1.notified().await;
    // Closing settles the rows that are not settled yet: it is part of the measured work.
    outbox.close().await;
    let took = started.elapsed();
    anyhow::ensure!(outbox.table().pending_types().await?.is_empty(), "not every row is done");
    anyhow::ensure!(delivered.0.load(Ordering::Relaxed) == count, "an event was delivered twice");
    Ok(rate(count, took))
}

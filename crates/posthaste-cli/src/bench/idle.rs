use std::time::Duration;

use serde_json::{Value, json};

use super::Figure;
use super::server::Server;
use crate::client::Client;

/// As many as the default configuration allows.
const CHANNELS: usize = 1_000;

/// An idle server in a process of its own.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    // The first start creates the database. Measure the second one, which is the usual case.
    drop(Server::start(folder.path())?);
    let (server, start) = Server::start(folder.path())?;
    let window = Duration::from_secs(if quick { 3 } else { 15 });
    let (cpu, memory) = (server.idle_cpu(window).await?, server.resident_megabytes()?);
    open_channels(&Client::new(server.url())?).await?;
    let (busy_cpu, busy_memory) = (server.idle_cpu(window).await?, server.resident_megabytes()?);
    Ok(vec![
        Figure::new("idle", "start until ready", start.as_secs_f64(), "s").at_most(0.5),
        Figure::new("idle", "CPU of one core", cpu, "%").at_most(1.0),
        Figure::new("idle", "memory", memory, "MB").at_most(80.0),
        Figure::new("idle", format!("CPU of one core, {CHANNELS} channels"), busy_cpu, "%").at_most(1.0),
        Figure::new("idle", format!("memory, {CHANNELS} channels"), busy_memory, "MB"),
    ])
}

/// Publishes one event of each type, and waits until all are published.
async fn open_channels(client: &Client) -> anyhow::Result<()> {
    let event = |number| json!({ "eventType": format!("type-{number}"), "sourceService": "bench", "payload": {} });
    let events: Vec<Value> = (0..CHANNELS).map(event).collect();
    client.publish_batch(serde_json::to_vec(&events)?.into()).await?;
    while client.channels().await?.items.iter().any(|channel| channel.lag_seconds > 0.0) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

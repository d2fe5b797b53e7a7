use std::time::Duration;

use super::Figure;
use super::server::Server;

/// An idle server in a process of its own.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    // The first start creates the database. Measure the second one, which is the usual case.
    drop(Server::start(folder.path())?);
    let (server, start) = Server::start(folder.path())?;
    let window = Duration::from_secs(if quick { 3 } else { 15 });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = server.cpu_ticks()?;
    tokio::time::sleep(window).await;
    let ticks = server.cpu_ticks()? - before;
    // On Linux, a tick is a hundredth of a second.
    let cpu = ticks as f64 / window.as_secs_f64();
    let memory = server.resident_megabytes()?;
    Ok(vec![
        Figure::new("idle", "start until ready", start.as_secs_f64(), "s").at_most(0.5),
        Figure::new("idle", "CPU of one core", cpu, "%").at_most(1.0),
        Figure::new("idle", "memory", memory, "MB").at_most(80.0),
    ])
}

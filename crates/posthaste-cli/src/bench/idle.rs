use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Figure;

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

struct Server(Child);

impl Server {
    /// Starts the server; returns it and the time until it printed its address.
    fn start(folder: &Path) -> anyhow::Result<(Self, Duration)> {
        let started = Instant::now();
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", "--listen", "127.0.0.1:0"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut server = Self(child);
        let stderr = server.0.stderr.take().context("the server's stderr")?;
        let mut lines = std::io::BufReader::new(stderr).lines();
        while let Some(line) = lines.next().transpose()? {
            if line.contains("http://") {
                let took = started.elapsed();
                // Keep reading and ignore the rest: a full pipe would block the server.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((server, took));
            }
        }
        anyhow::bail!("the server ended before it was ready")
    }

    fn cpu_ticks(&self) -> anyhow::Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()))?;
        // The second field is a name in parentheses that may contain any text. User and system time are the 12th and
        // 13th fields after it.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
        Ok(ticks(11).context("user time")? + ticks(12).context("system time")?)
    }

    fn resident_megabytes(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("resident memory")?;
        let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kilobytes / 1_024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that the server has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Figure;

/// A server of its own process with nothing to do.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let folder = tempfile::tempdir()?;
    // The first start makes the database; what counts is a start as it happens every day.
    drop(Server::start(folder.path())?);
    let (server, start) = Server::start(folder.path())?;
    let window = Duration::from_secs(if quick { 3 } else { 15 });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = server.cpu_ticks()?;
    tokio::time::sleep(window).await;
    let ticks = server.cpu_ticks()? - before;
    // A tick is a hundredth of a second wherever Linux runs.
    let cpu = ticks as f64 / window.as_secs_f64();
    let memory = server.resident_megabytes()?;
    Ok(vec![
        Figure::new("idle", "start until it answers", start.as_secs_f64(), "s").at_most(0.5),
        Figure::new("idle", "CPU of one core", cpu, "%").at_most(1.0),
        Figure::new("idle", "memory", memory, "MB").at_most(80.0),
    ])
}

struct Server(Child);

impl Server {
    /// The server, and how long it took until it said that it answers.
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
                // Nobody reads on, but the server must still be able to write.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((server, took));
            }
        }
        anyhow::bail!("the server ended before it answered")
    }

    fn cpu_ticks(&self) -> anyhow::Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()))?;
        // The second field is a name in parentheses that may hold anything; user and system time are 12th and 13th after.
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
        // Ended already, or of no use any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

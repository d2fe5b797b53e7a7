use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

/// A server in a process of its own.
pub struct Server {
    process: Child,
    url: String,
}

impl Server {
    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// How many megabytes it has written to disk.
    pub fn written_megabytes(&self) -> anyhow::Result<f64> {
        let io = std::fs::read_to_string(format!("/proc/{}/io", self.process.id()))?;
        let line = io.lines().find_map(|line| line.strip_prefix("write_bytes:")).context("bytes written")?;
        Ok(line.trim().parse::<f64>()? / 1e6)
    }

    /// Starts the server; returns it and the time until it printed its address.
    pub fn start(folder: &Path) -> anyhow::Result<(Self, Duration)> {
        let started = Instant::now();
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", "--listen", "127.0.0.1:0"])
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut server = Self { process: child, url: String::new() };
        let stderr = server.process.stderr.take().context("the server's stderr")?;
        let mut lines = std::io::BufReader::new(stderr).lines();
        while let Some(line) = lines.next().transpose()? {
            if let Some(start) = line.find("http://") {
                let took = started.elapsed();
                server.url = line[start..].trim_end().trim_end_matches("/api").to_owned();
                // Keep reading and ignore the rest: a full pipe would block the server.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((server, took));
            }
        }
        anyhow::bail!("the server ended before it was ready")
    }

    /// How much of one core it uses while it is idle, in percent.
    pub async fn idle_cpu(&self, window: Duration) -> anyhow::Result<f64> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let before = self.cpu_ticks()?;
        tokio::time::sleep(window).await;
        // On Linux, a tick is a hundredth of a second.
        Ok((self.cpu_ticks()? - before) as f64 / window.as_secs_f64())
    }

    pub fn cpu_ticks(&self) -> anyhow::Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        // The second field is a name in parentheses that may contain any text. User and system time are the 12th and
        // 13th fields after it.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
        Ok(ticks(11).context("user time")? + ticks(12).context("system time")?)
    }

    pub fn resident_megabytes(&self) -> anyhow::Result<f64> {
        self.status("VmRSS:")
    }

    /// The most memory that it ever had.
    pub fn peak_megabytes(&self) -> anyhow::Result<f64> {
        self.status("VmHWM:")
    }

    fn status(&self, name: &str) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("memory")?;
        let kilobytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kilobytes / 1_024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that the server has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

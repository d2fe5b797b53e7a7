use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::node::{Entry, ROLE, Role};

/// The time after which a test stops waiting and fails.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A node in a process of its own.
pub struct Node {
    child: Child,
    diary: PathBuf,
}

impl Node {
    pub fn start(role: &Role) -> Self {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args(["serve_when_started_as_a_node", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, serde_json::to_string(role).expect("a role is JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a node starts");
        Self { child, diary: role.diary.clone() }
    }

    pub fn signal(&self, name: &str) {
        let killed = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(killed.expect("the program kill is there").success());
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.signal("KILL");
        self.child.wait().expect("the node ends");
    }

    /// Closes the node's stdin and waits until it has ended without an error.
    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().expect("the node ends");
        assert!(ended.success(), "a node failed at its end: {ended}");
    }

    pub fn entries(&self) -> Vec<Entry> {
        read(&self.diary)
    }

    /// Waits until the diary fulfils a condition.
    pub async fn wait_until(&self, what: &str, is_so: impl Fn(&[Entry]) -> bool) {
        wait_until(what, async || is_so(&self.entries())).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The node may be paused, or may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks a condition repeatedly until it is true.
pub async fn wait_until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The whole lines of a diary; the last line may be incomplete.
pub fn read(diary: &PathBuf) -> Vec<Entry> {
    let text = std::fs::read_to_string(diary).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("an entry is JSON")).collect()
}

pub fn written(entries: &[Entry]) -> bool {
    entries.contains(&Entry::Written)
}

pub fn started(entries: &[Entry]) -> usize {
    entries.iter().filter(|entry| matches!(entry, Entry::Started { .. })).count()
}

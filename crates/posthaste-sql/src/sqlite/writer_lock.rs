use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use posthaste_core::lock;
use tokio::sync::OwnedMutexGuard;

/// How long SQLite itself waits for the lock of a file.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The right to write to a file, among the tasks of this process.
///
/// SQLite lets one connection write at a time. A connection that has to wait sleeps and tries again, longer each time,
/// so the connection that happens to try first wins. With this lock, tasks wait in a fair queue and are woken. Between
/// processes, and for transactions that do not use this lock, the lock of the file decides.
#[derive(Clone)]
pub(super) struct WriterLock(Arc<tokio::sync::Mutex<()>>);

/// Released when it is dropped.
pub(super) type WriterPermit = OwnedMutexGuard<()>;

/// One lock for each file that is open in this process. Opening a file again gives the same lock.
static LOCKS: Mutex<Vec<(PathBuf, Weak<tokio::sync::Mutex<()>>)>> = Mutex::new(Vec::new());

impl WriterLock {
    /// The lock of an existing file.
    pub(super) fn of(file: &Path) -> Self {
        let file = std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let mut locks = lock(&LOCKS);
        locks.retain(|(_, known)| known.strong_count() > 0);
        let known = locks.iter().find(|(path, _)| *path == file).and_then(|(_, known)| known.upgrade());
        Self(known.unwrap_or_else(|| {
            let new = Arc::default();
            locks.push((file, Arc::downgrade(&new)));
            new
        }))
    }

    /// Waits for the lock, at most this long.
    pub(super) async fn acquire(&self, timeout: Duration) -> Option<WriterPermit> {
        tokio::time::timeout(timeout, self.0.clone().lock_owned()).await.ok()
    }
}

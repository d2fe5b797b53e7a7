use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

/// How long SQLite itself waits for the lock of a file.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Whose turn it is to write to a file, among those of this process who ask.
///
/// SQLite lets one write at a time, and who has to wait sleeps and tries again, longer each time: whoever comes back
/// soonest wins. Here they wait in a row and are woken. Between processes, and for transactions that know nothing of
/// this, the lock of the file goes on to be what counts.
#[derive(Clone)]
pub(super) struct Turn(Arc<tokio::sync::Mutex<()>>);

/// Given back when it is dropped.
pub(super) type Taken = OwnedMutexGuard<()>;

/// Of every file that is open in this process: whoever opens a file again has to wait for the same turn.
static TURNS: Mutex<Vec<(PathBuf, Weak<tokio::sync::Mutex<()>>)>> = Mutex::new(Vec::new());

impl Turn {
    /// The turn of an existing file.
    pub(super) fn of(file: &Path) -> Self {
        let file = std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|(_, turn)| turn.strong_count() > 0);
        let known = turns.iter().find(|(path, _)| *path == file).and_then(|(_, turn)| turn.upgrade());
        Self(known.unwrap_or_else(|| {
            let turn = Arc::default();
            turns.push((file, Arc::downgrade(&turn)));
            turn
        }))
    }

    /// Waits for it, for so long at most: somebody may keep it for longer than anybody can wait.
    pub(super) async fn take(&self, at_most: Duration) -> Option<Taken> {
        tokio::time::timeout(at_most, self.0.clone().lock_owned()).await.ok()
    }
}

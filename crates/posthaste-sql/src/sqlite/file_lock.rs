use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

/// A locked file, which shows other processes that a database is in use. The operating system unlocks it when the
/// process ends.
pub(super) struct FileLock {
    _file: File,
}

impl FileLock {
    pub(super) fn acquire(path: &Path) -> Result<Self, TryLockError> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false);
        let file = for_owner_only(&mut options).open(path).map_err(TryLockError::Error)?;
        file.try_lock()?;
        Ok(Self { _file: file })
    }

    /// True if a process has the lock. The check does not create the file.
    pub(super) fn is_held(path: &Path) -> io::Result<bool> {
        match OpenOptions::new().read(true).open(path) {
            Ok(file) => match file.try_lock_shared() {
                Ok(()) => Ok(false),
                Err(TryLockError::WouldBlock) => Ok(true),
                Err(TryLockError::Error(error)) => Err(error),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Creates a new database file that only its owner can read, because it holds payloads. SQLite gives the files beside
/// it (-wal, -shm) the mode of the database file. An existing file keeps its mode.
pub(super) fn make_private(path: &Path) {
    let mut options = OpenOptions::new();
    match for_owner_only(options.write(true).create_new(true)).open(path) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => warn_if_public(path),
        // SQLite will report the error.
        Err(_) => {}
    }
}

#[cfg(unix)]
fn for_owner_only(options: &mut OpenOptions) -> &mut OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    options.mode(0o600)
}

#[cfg(not(unix))]
fn for_owner_only(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

#[cfg(unix)]
fn warn_if_public(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o777).unwrap_or(0);
    if mode & 0o007 != 0 {
        let path = path.display();
        tracing::warn!("every user can read or write database {path} (mode {mode:03o}): run `chmod 600 {path}`");
    }
}

#[cfg(not(unix))]
fn warn_if_public(_: &Path) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_acquired_once_and_released_when_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.db.lock");
        assert!(!FileLock::is_held(&path).unwrap() && !path.exists());
        let lock = FileLock::acquire(&path).unwrap();
        assert!(matches!(FileLock::acquire(&path), Err(TryLockError::WouldBlock)));
        assert!(FileLock::is_held(&path).unwrap());
        drop(lock);
        assert!(!FileLock::is_held(&path).unwrap());
        assert!(FileLock::acquire(&path).is_ok());
    }
}

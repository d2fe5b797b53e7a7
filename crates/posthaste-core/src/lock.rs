use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even if a thread panicked while it had the mutex locked.
///
/// Every lock in this project guards data that is whole between two statements: a panic in between leaves nothing half
/// done that another thread could see. So there is no reason to spread one panic to every thread that needs the same
/// data.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

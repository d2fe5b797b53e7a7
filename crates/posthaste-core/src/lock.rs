use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also when a thread has panicked while it held the lock.
///
/// Every lock in this project guards data that is whole between two statements: a panic in between leaves nothing half done
/// that another thread could see. So there is no reason to spread one panic to everybody who needs the same data.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

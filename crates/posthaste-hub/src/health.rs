use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use posthaste_core::lock;

/// The size of the write that checks the database: more than a page, so that it needs space on the disk.
const SMALL_WRITE: usize = 8 * 1024;
/// The largest size that a check writes. A larger write proves no more.
const LARGE_WRITE: usize = 2 * 1024 * 1024;

/// Collects the reports of parts of a hub that cannot do their work.
#[derive(Clone, Default)]
pub(crate) struct Health(Arc<Inner>);

#[derive(Default)]
struct Inner {
    failing: Mutex<BTreeMap<String, String>>,
    failed_write: AtomicUsize,
}

impl Health {
    /// Reports that a part does not do its work, with the reason.
    pub(crate) fn down(&self, part: &str, reason: String) {
        lock(&self.0.failing).insert(part.to_owned(), reason);
    }

    /// Reports that a part does its work again.
    pub(crate) fn up(&self, part: &str) {
        lock(&self.0.failing).remove(part);
    }

    /// Each part that does not do its work, with the reason.
    pub(crate) fn failing(&self) -> BTreeMap<String, String> {
        lock(&self.0.failing).clone()
    }

    /// Reports that the database failed to write this many bytes. A disk that is nearly full still accepts small
    /// writes, so the next check has to write as much.
    pub(crate) fn write_failed(&self, bytes: usize) {
        self.0.failed_write.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Reports that the database accepted a write of the size to check.
    pub(crate) fn write_succeeded(&self) {
        self.0.failed_write.store(0, Ordering::Relaxed);
    }

    /// The number of bytes that a check has to write.
    pub(crate) fn write_to_check(&self) -> usize {
        self.0.failed_write.load(Ordering::Relaxed).clamp(SMALL_WRITE, LARGE_WRITE)
    }
}

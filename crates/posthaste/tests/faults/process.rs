//! A node in a process of its own.

use std::path::Path;

use posthaste_backend_tests::processes::{DiaryReader, Process};
pub use posthaste_backend_tests::processes::{PATIENCE, wait_until};

use crate::node::{Entry, Role};

pub type Node = Process<Role>;

/// The whole lines of a diary.
pub fn read(diary: impl AsRef<Path>) -> Vec<Entry> {
    DiaryReader::new(diary.as_ref()).entries()
}

pub fn written(entries: &[Entry]) -> bool {
    entries.contains(&Entry::Written)
}

pub fn started(entries: &[Entry]) -> usize {
    entries.iter().filter(|entry| matches!(entry, Entry::Started { .. })).count()
}

//! Confluent's client library for Python.

use std::path::{Path, PathBuf};

/// The Python interpreter that has Confluent's client library.
pub fn confluent_python() -> PathBuf {
    let given = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")));
    let folder = given("POSTHASTE_TEST_SERVERS").or_else(|| Some(cache()?.join("posthaste-test-servers")));
    let python = folder.unwrap_or_default().join("confluent-kafka-2.16.0/bin/python");
    assert!(is_file(&python), "there is no {}: run ./test, which fetches it", python.display());
    python
}

fn is_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file())
}

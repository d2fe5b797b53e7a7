use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{PoisonError, RwLock};

/// The most entries of a cache.
const MAX_ENTRIES: usize = 10_000;
/// The most memory of all entries of a cache, by what their owner says.
const MAX_BYTES: usize = 64 * 1024 * 1024;

/// Entries that never change. A full cache is emptied: the entries that are in use come back.
pub(crate) struct BoundedCache<K, V> {
    entries: RwLock<Entries<K, V>>,
}

struct Entries<K, V> {
    map: HashMap<K, V>,
    bytes: usize,
}

impl<K, V> Default for BoundedCache<K, V> {
    fn default() -> Self {
        Self { entries: RwLock::new(Entries { map: HashMap::new(), bytes: 0 }) }
    }
}

impl<K: Eq + Hash, V> BoundedCache<K, V> {
    /// Passes an entry to `read`, without a copy of it.
    pub(crate) fn with<Q, T>(&self, key: &Q, read: impl FnOnce(&V) -> T) -> Option<T>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.map.get(key).map(read)
    }

    pub(crate) fn insert(&self, key: K, value: V, bytes: usize) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.map.len() >= MAX_ENTRIES || entries.bytes.saturating_add(bytes) > MAX_BYTES {
            entries.map.clear();
            entries.bytes = 0;
        }
        // An entry that is replaced is counted twice, which only empties the cache sooner.
        entries.bytes += bytes;
        entries.map.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_is_emptied() {
        let cache = BoundedCache::default();
        for number in 0..MAX_ENTRIES {
            cache.insert(number, number, 1);
        }
        assert_eq!(cache.with(&0, |value| *value), Some(0));
        cache.insert(MAX_ENTRIES, 7, 1);
        assert_eq!((cache.with(&0, |value| *value), cache.with(&MAX_ENTRIES, |value| *value)), (None, Some(7)));
        cache.insert(1, 1, MAX_BYTES - 1);
        assert_eq!(cache.with(&MAX_ENTRIES, |value| *value), Some(7));
        cache.insert(2, 2, 1);
        assert_eq!((cache.with(&1, |value| *value), cache.with(&2, |value| *value)), (None, Some(2)));
    }
}

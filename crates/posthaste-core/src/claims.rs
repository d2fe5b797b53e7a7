use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;

use tokio::time::Instant;

/// The claims of this process that are not settled.
///
/// A claim is identified by its key and its [`ClaimToken`]. A process may lose a claim and claim the same row again: a
/// task with the token of the old claim cannot change the new one.
///
/// Times are those of a monotonic clock. A wall clock that is set forward ends every lease in the database at once; the
/// rows that this process is delivering at that moment must not be claimed a second time.
pub struct Claims<K, V> {
    by_key: HashMap<K, Entry<V>>,
}

struct Entry<V> {
    token: ClaimToken,
    until: Instant,
    value: V,
}

/// The fencing token of a claim, as this process knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClaimToken {
    /// The number of the claim in this process; 0 where claims are not numbered.
    pub number: u64,
    /// The generation of the ownership under which the claim was made; 0 if each item has its own lease.
    pub generation: i64,
}

impl<K, V> Default for Claims<K, V> {
    fn default() -> Self {
        Self { by_key: HashMap::new() }
    }
}

impl<K: Eq + Hash, V> Claims<K, V> {
    /// Adds a claim whose lease ends at `until` unless it is extended. Returns the claim that it replaces.
    pub fn insert(&mut self, key: K, token: ClaimToken, until: Instant, value: V) -> Option<V> {
        self.by_key.insert(key, Entry { token, until, value }).map(|old| old.value)
    }

    /// The claim with this key and this token.
    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q, token: ClaimToken) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.by_key.get(key).filter(|entry| entry.token == token).map(|entry| &entry.value)
    }

    /// The claim with this key and this token.
    pub fn get_mut<Q: Hash + Eq + ?Sized>(&mut self, key: &Q, token: ClaimToken) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        self.by_key.get_mut(key).filter(|entry| entry.token == token).map(|entry| &mut entry.value)
    }

    /// The claim with this key, and its token.
    pub fn current<Q: Hash + Eq + ?Sized>(&mut self, key: &Q) -> Option<(ClaimToken, &mut V)>
    where
        K: Borrow<Q>,
    {
        self.by_key.get_mut(key).map(|entry| (entry.token, &mut entry.value))
    }

    /// The value that is claimed with this key, with any token.
    pub fn value<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.by_key.get(key).map(|entry| &entry.value)
    }

    /// True if the key is claimed, with any token.
    pub fn contains<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.by_key.contains_key(key)
    }

    /// Extends a claim whose lease was renewed. False if the claim is gone.
    pub fn extend<Q: Hash + Eq + ?Sized>(&mut self, key: &Q, token: ClaimToken, until: Instant) -> bool
    where
        K: Borrow<Q>,
    {
        match self.by_key.get_mut(key).filter(|entry| entry.token == token) {
            Some(entry) => {
                entry.until = until;
                true
            }
            None => false,
        }
    }

    /// Removes a claim that is settled, released or lost.
    pub fn remove<Q: Hash + Eq + ?Sized>(&mut self, key: &Q, token: ClaimToken) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.get(key, token)?;
        self.by_key.remove(key).map(|entry| entry.value)
    }

    /// Removes the claims for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, ClaimToken, &V) -> bool) {
        self.by_key.retain(|key, entry| keep(key, entry.token, &entry.value));
    }

    /// Removes the claims whose lease has ended, unless `keep` is true for them. The relay renews what it delivers, so
    /// the removed claims are not being delivered.
    pub fn expire(&mut self, now: Instant, keep: impl Fn(&V) -> bool) {
        self.by_key.retain(|_, entry| entry.until > now || keep(&entry.value));
    }

    /// The claimed keys.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.by_key.keys()
    }

    /// The claimed keys, with what is known about each.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.by_key.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// Removes all claims.
    pub fn clear(&mut self) {
        self.by_key.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn token(number: u64) -> ClaimToken {
        ClaimToken { number, generation: 0 }
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_claim_cannot_touch_the_new_claim_of_the_same_key() {
        let (mut claims, end) = (Claims::default(), Instant::now() + Duration::from_secs(1));
        claims.insert("a", token(1), end, ());
        claims.insert("a", token(2), end, ());
        assert!(!claims.extend("a", token(1), end));
        assert_eq!(claims.remove("a", token(1)), None);
        assert_eq!(claims.remove("a", token(2)), Some(()));
        assert!(!claims.contains("a"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_not_renewed_expires() {
        let (mut claims, now) = (Claims::default(), Instant::now());
        let second = Duration::from_secs(1);
        for (key, is_settling) in [("renewed", false), ("lost", false), ("settling", true)] {
            claims.insert(key, token(1), now + second, is_settling);
        }
        assert!(claims.extend("renewed", token(1), now + 3 * second));
        claims.expire(now + 2 * second, |is_settling| *is_settling);
        let mut left: Vec<&str> = claims.keys().copied().collect();
        left.sort_unstable();
        assert_eq!(left, ["renewed", "settling"]);
    }
}

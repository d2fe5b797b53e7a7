use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

/// The parts of a key: source service, event type, resource type, operation type, tenant.
pub(super) const PARTS: usize = 5;

/// The key of subscriptions; a part that is a wildcard is absent.
///
/// The texts of all parts are in one place, so that a comparison costs one access to memory that is not in the cache.
pub(super) struct Key {
    hash: u64,
    text: Box<str>,
    lengths: [Option<usize>; PARTS],
}

/// The key that subscriptions to an event have, if they have certain wildcards.
pub(super) struct KeyOfEvent<'a> {
    hash: u64,
    parts: [Option<&'a str>; PARTS],
}

/// Hashes each part of a key once. The hash of a key is made from those of its parts, so a look-up with other wildcards
/// does not read the parts again.
#[derive(Default)]
pub(super) struct PartHasher(RandomState);

/// The parts of an event and their hashes.
pub(super) struct HashedParts<'a>([Option<(&'a str, u64)>; PARTS]);

impl PartHasher {
    pub(super) fn hashed<'a>(&self, parts: [Option<&'a str>; PARTS]) -> HashedParts<'a> {
        let mut number = 0_u8;
        HashedParts(parts.map(|part| {
            number += 1;
            part.map(|text| (text, self.0.hash_one((number, text))))
        }))
    }
}

impl<'a> HashedParts<'a> {
    /// The key with these wildcards, which are true; `None` if another part is absent.
    pub(super) fn key(&self, wildcards: &[bool; PARTS]) -> Option<KeyOfEvent<'a>> {
        let mut key = KeyOfEvent { hash: 0, parts: [None; PARTS] };
        for (number, is_wildcard) in wildcards.iter().enumerate() {
            if !is_wildcard {
                let (text, hash) = self.0[number]?;
                key.parts[number] = Some(text);
                key.hash ^= hash;
            }
        }
        Some(key)
    }
}

impl Key {
    /// The key of a subscription with these parts.
    pub(super) fn new(parts: &HashedParts<'_>) -> Self {
        let given = parts.0.iter().flatten();
        Self {
            hash: given.clone().fold(0, |all, (_, hash)| all ^ hash),
            text: given.map(|(text, _)| *text).collect(),
            lengths: parts.0.map(|part| part.map(|(text, _)| text.len())),
        }
    }

    /// True for each part that is a wildcard.
    pub(super) fn wildcards(&self) -> [bool; PARTS] {
        self.lengths.map(|length| length.is_none())
    }
}

/// A key that can be compared with one in the index.
pub(super) trait AnyKey {
    fn hash(&self) -> u64;
    fn parts(&self) -> [Option<&str>; PARTS];
}

impl AnyKey for Key {
    fn hash(&self) -> u64 {
        self.hash
    }

    fn parts(&self) -> [Option<&str>; PARTS] {
        let mut rest = &*self.text;
        self.lengths.map(|length| {
            let (part, after) = rest.split_at(length?);
            rest = after;
            Some(part)
        })
    }
}

impl AnyKey for KeyOfEvent<'_> {
    fn hash(&self) -> u64 {
        self.hash
    }

    fn parts(&self) -> [Option<&str>; PARTS] {
        self.parts
    }
}

impl<'a> Borrow<dyn AnyKey + 'a> for Key {
    fn borrow(&self) -> &(dyn AnyKey + 'a) {
        self
    }
}

impl Hash for dyn AnyKey + '_ {
    fn hash<H: Hasher>(&self, state: &mut H) {
        AnyKey::hash(self).hash(state);
    }
}

impl PartialEq for dyn AnyKey + '_ {
    fn eq(&self, other: &Self) -> bool {
        AnyKey::hash(self) == AnyKey::hash(other) && self.parts() == other.parts()
    }
}

impl Eq for dyn AnyKey + '_ {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let (one, other): (&dyn AnyKey, &dyn AnyKey) = (self, other);
        one == other
    }
}

impl Eq for Key {}

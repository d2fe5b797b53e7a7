use std::time::Duration;

use async_trait::async_trait;

use crate::StoreError;
use crate::outbox::{Reader, Registration};

/// What all processes that read a table have agreed on, and in single-node mode which process reads it now.
#[async_trait]
pub trait OwnershipStore {
    /// Records [`Registration::of`] these where nothing is recorded yet, and returns what is recorded now. A record of the
    /// same reader and mode that lacks a lease or a dead-head rule gets this one's. Nothing else that is recorded ever
    /// changes, so processes that start at the same time get the same answer.
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError>;

    /// Single node: makes `owner` the owner for one lease from now, if it is the owner already, or there is none, or the
    /// lease of the other owner has ended. The generation rises with every change of owner.
    ///
    /// An ownership that ends later than eleven tenths of a lease from now was taken before the clock was set back: it has
    /// ended.
    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError>;

    /// Single node: ends the ownership of this owner, if it is the owner.
    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError>;
}

/// Who owns a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The process that asked.
    Us {
        /// Rises with every change of owner.
        generation: i64,
    },
    /// Another process.
    Other {
        /// Until its lease ends, unless it is renewed.
        remaining: Duration,
    },
}

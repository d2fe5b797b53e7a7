use std::time::Duration;

use async_trait::async_trait;

use crate::StoreError;
use crate::outbox::{Reader, Registration};

/// The settings that all readers of a table share, and in single-node mode the process that reads it now.
#[async_trait]
pub trait OwnershipStore {
    /// Records [`Registration::of`] these arguments if nothing is recorded yet, and returns what is recorded now. A
    /// registration of the same reader and mode that lacks a lease or a dead-head rule gets the one of this process.
    /// Nothing else that is recorded ever changes, so processes that start at the same time get the same result.
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError>;

    /// What is recorded; `None` if no reader has been registered.
    async fn registered(&self) -> Result<Option<Registration>, StoreError>;

    /// Single node: makes `owner` the owner for one lease from now, if it is the owner already, or there is none, or
    /// the lease of the other owner has ended. The generation rises with every change of owner.
    ///
    /// An ownership that ends later than eleven tenths of a lease from now was acquired before the clock was set back:
    /// it has ended.
    async fn acquire_ownership(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError>;

    /// Single node: ends the ownership of this owner, if it is the owner.
    async fn release_ownership(&self, owner: &str) -> Result<(), StoreError>;
}

/// The owner of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The calling process.
    Us {
        /// Rises with every change of owner.
        generation: i64,
    },
    /// Another process.
    Other {
        /// How long until its lease ends, unless it is renewed.
        remaining: Duration,
    },
}

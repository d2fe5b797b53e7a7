//! The outbox: a table in the service's own database, the door through which events come in with a transaction, and the
//! source through which they go out.
//!
//! A database takes part by implementing [`Store`], which is nothing but statements, and [`Upkeep`], what operators need.
//! Everything that is not a statement is here, once for all databases: what a process remembers of its claims
//! ([`Table`]), the hot path and the hooks of a writer ([`Transaction`]), and the service that puts them together
//! ([`Outbox`]).

mod builder;
mod hold;
mod hook;
mod item;
mod lane;
mod mode;
mod ownership;
mod purger;
mod registration;
mod releaser;
mod service;
mod settings;
mod source;
mod store;
mod table;
mod table_name;
mod transaction;
mod upkeep;
mod write;

pub use builder::{OutboxBuilder, StartError};
pub use hook::{HookError, WriterHook};
pub use item::OutboxItem;
pub use lane::STARTED;
pub use mode::{DeadHead, Mode, Reader};
pub use purger::Retention;
pub use registration::{Registration, lease_millis, recorded_lease};
pub use service::{DeadEvents, Outbox};
pub use settings::{BadSetting, Settings, Unroutable};
pub use source::OutboxSource;
pub use store::{
    Change, Changed, Chosen, DEAD_AFTER_LOSSES, FOUND_AMONG, Leases, MAX_CLAIM_BYTES, Met, OpenError, OutboxStatus,
    Owner, Pending, Pool, Position, SUSPECT_GROUP, Store, Taken, Wanted, choose_runs, lease_lost_error,
};
pub use table::Table;
pub use table_name::{BadTableName, TableName};
pub use transaction::{InTransaction, Notes, Transaction};
pub use upkeep::{DeadFilter, OutboxRow, Purge, Upkeep};
pub use write::WriteError;

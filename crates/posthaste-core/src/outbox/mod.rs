//! The outbox: a table in the service's own database. Events are inserted in the service's transactions, and claimed
//! from there by a dispatcher or by the channels of the hub.
//!
//! A database implements [`Store`], which contains nothing but statements. Everything that is not a statement is here,
//! once for all databases: the claims of a process ([`Table`]), the rule for which rows are claimed ([`select`]), the
//! hot path and the hooks of a writer ([`Transaction`]), and the service that combines them ([`Outbox`]).

mod builder;
mod cursor;
mod hook;
mod hot_path;
mod item;
mod listeners;
mod mode;
mod open_error;
mod ownership;
mod purger;
mod registration;
mod releaser;
mod row_claims;
mod row_update;
mod selection;
mod service;
mod settings;
mod source;
mod store;
mod sweeper;
mod table;
mod table_name;
mod transaction;
mod write;

pub use builder::{OutboxBuilder, StartError};
pub use cursor::STARTED;
pub use hook::{HookError, WriterHook};
pub use item::OutboxItem;
pub use listeners::{Interceptor, ListenerSink, Listeners, RegistrationError};
pub use mode::{DeadHead, Mode, Reader};
pub use open_error::OpenError;
pub use purger::Retention;
pub use registration::{Registration, lease_millis};
pub use row_update::{OutboxStatus, RowUpdate};
pub use selection::{Candidate, DEAD_AFTER_LOSSES, MAX_CLAIM_BYTES, SUSPECT_GROUP, Selection, select};
pub use service::{DeadEvents, Outbox};
pub use settings::{BadSetting, Settings, Unroutable};
pub use source::OutboxSource;
pub use store::{
    BlockedRows, ClaimRequest, ClaimStore, ClaimedRow, ClaimedRows, DeadFilter, InTransaction, LOST_CLAIM_SCAN,
    LeaseSet, LeaseStore, MAX_LISTED_TYPES, Notifier, OperatorStore, OutboxRow, Owner, OwnershipStore, Pool, Position,
    Purge, SettleStore, SettledRows, Store, WriteStore, unblock_limit,
};
pub use table::Table;
pub use table_name::{BadTableName, TableName};
pub use transaction::Transaction;
pub use write::WriteError;

/// The roles of a [`Store`], for code that calls their methods: `use posthaste_core::outbox::roles::*`.
pub mod roles {
    pub use super::{
        ClaimStore as _, LeaseStore as _, Notifier as _, OperatorStore as _, OwnershipStore as _, SettleStore as _,
        WriteStore as _,
    };
}

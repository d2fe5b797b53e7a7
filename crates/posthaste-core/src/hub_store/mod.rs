//! The stores that a hub needs: one trait for each role, with laws.
//!
//! A database is supported by an implementation of [`HubDatabase`], which opens the stores of all roles. The stores
//! only run statements. The decisions are in this crate, once for all databases: which dead letters this process has
//! claimed ([`DeadLetterSource`]), how an attempt changes a dead letter ([`DeadLetterUpdate`]), and which event type
//! owns which topic ([`TopicOwners`]).

mod audit;
mod channels;
mod database;
mod dead_letter_list;
mod dead_letter_room;
mod dead_letter_source;
mod dead_letter_update;
mod dead_letters;
mod idempotency;
mod log;
mod migrations;
mod outbox;
mod quarantine;
mod registry;
mod schemas;
mod source_database;
mod topic_owners;

pub use audit::{
    AuditCursor, AuditEntry, AuditFilter, AuditPage, AuditPageRequest, AuditStore, LogType, MAX_AUDIT_MESSAGE,
    UnknownLogType,
};
pub use channels::{Admission, ChannelStore, Ingested, RecordedChannel, Refusal};
pub use database::{HubDatabase, HubOptions, HubStores, OpenError};
pub use dead_letter_list::{
    BadCursor, BadSort, DeadLetterCursor, DeadLetterFilter, DeadLetterPage, DeadLetterSort, DeadLetterSortKey,
};
pub use dead_letter_room::{DeadLetterRoom, Room, Unlimited};
pub use dead_letter_source::DeadLetterSource;
pub use dead_letter_update::{DeadLetterUpdate, DueChange};
pub use dead_letters::{
    DeadLetter, DeadLetterClaimId, DeadLetterClaimRequest, DeadLetterDetail, DeadLetterFields, DeadLetterHistory,
    DeadLetterQueries, DeadLetterReplays, DeadLetterRow, DeadLetterStatus, DeadLetterStore, NewDeadLetter, Replay,
    ReplayResult, ReplayResults, Trigger, WaitingSubscription,
};
pub use idempotency::{EventIdentity, deduplicate, deduplicate_atomic};
pub use log::{Backlog, BusInspector, GroupProgress, LogEntry, READ_BYTES, READ_RECORDS, ResetTo, TopicState};
pub use migrations::{Fit, Migration, MigrationState, Migrations, Schema, TableRows};
pub use outbox::HubOutbox;
pub use quarantine::{
    ExpiredRecords, QuarantineCount, QuarantineCursor, QuarantineFilter, QuarantinePage, QuarantineStatus,
    QuarantineStore, QuarantinedRecord, QuarantinedRow,
};
pub use registry::{
    Created, Definition, DefinitionFields, DefinitionStore, EventKey, Page, PageRequest, Registry, RegistryError,
    Subscription, SubscriptionFields, SubscriptionFilter, SubscriptionStore,
};
pub use schemas::{Applied, SchemaChange, SchemaReference, SchemaStore, SchemaText, Subject, SubjectVersion};
pub use source_database::SourceDatabase;
pub use topic_owners::{BatchOwners, TopicOwners, topic_key};

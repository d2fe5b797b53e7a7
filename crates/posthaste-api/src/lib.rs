//! The wire contract of Posthaste: the messages between hub, server, CLI and bus.
//!
//! Input is checked strictly: unknown fields are refused, with a suggestion ([`suggest`]), and all violations of an
//! input are reported together, each with its field ([`read_json`]). Output cannot contain a secret: types that carry
//! credentials exist for input only.
//!
//! [`proto`] contains the Protobuf messages of the bus; everything else is JSON of the REST API.

mod auth;
mod base64_bytes;
mod channel;
mod checks;
mod dead_letter;
mod definition;
mod domain;
mod duration;
mod event;
mod filter;
mod headers;
mod mask;
mod problem;
mod publish;
mod quarantine;
mod readable;
mod replay;
mod source;
mod subscription;
mod topic;
mod topic_records;
mod trace;

pub mod duration_text;
pub mod input;
pub mod proto;
pub mod suggest;

pub use auth::{AuthIn, AuthOut, Secret};
pub use base64_bytes::Base64;
pub use channel::{ChannelList, ChannelOut, ChannelState};
pub use checks::read_time;
pub use dead_letter::{
    DeadLetter, DeadLetterDetail, DeadLetterPage, DeadLetterStatus, FailureSummary, RetryAttempt, Trigger,
};
pub use definition::{ANY, Definition, DefinitionIn, EventKey};
pub use domain::{Domain, UnknownDomain};
pub use duration::{DurationError, format_duration, parse_duration};
pub use event::{EventIn, MAX_DELAY, MAX_NAME, is_event_id, is_event_type};
pub use filter::{FilterConditionIn, filter_from_proto, filter_to_proto};
pub use headers::Headers;
pub use input::{Input, InputError, read_json, read_json_with};
pub use mask::{MASK, is_masked_endpoint, masked_endpoint};
pub use posthaste_core::filter::{Filter, FilterCondition, FilterOp, JsonText};
pub use problem::{FieldError, Problem};
pub use publish::{BatchItem, BatchOut, MAX_BATCH, PublishOut};
pub use quarantine::{
    QuarantineAction, QuarantineActionIn, QuarantineDiscardIn, QuarantineFilterIn, QuarantinePage, QuarantineReplayIn,
    QuarantineResult, QuarantineResults, QuarantineSelection, QuarantineStatus, QuarantinedDetail, QuarantinedRecord,
};
pub use readable::{readable, readable_event};
pub use replay::{ReplayIn, ReplayOut, ReplayResult};
pub use source::{SourceList, SourceMode, SourceOut, SourceState};
pub use subscription::{MAX_TIMEOUT, NewSubscription, PayloadType, Protocol, Subscription, SubscriptionIn, Target};
pub use topic::{GroupPosition, Reset, ResetIn, ResetOut, ResetTo, Topic, TopicList, TopicPartition};
pub use topic_records::{BadReadFrom, ReadFrom, TopicCursor, TopicRecord, TopicRecords};
pub use trace::{DeliveryState, EarlierEvents, EventTrace, OutboxState, OutboxStatus, TopicPosition, TracedDelivery};

/// The Protobuf schema of all messages on the bus.
pub const EVENTS_PROTO: &str = include_str!("../proto/posthaste/v1/events.proto");

//! The vocabulary, the rules, the traits and the engine of Posthaste.
//!
//! Everything the system does is one sentence: *a [`Relay`] moves claimed items from a [`Source`] to a [`Sink`] and
//! settles each with exactly one [`Outcome`]*. This crate knows no SQL, no broker and no HTTP; those are sources and
//! sinks in other crates, and they are correct when they obey the laws written on the traits here.

#![warn(missing_docs)]

mod backoff;
mod bus_source;
mod claims;
mod error;
mod event;
pub mod heartbeat;
mod load;
mod lock;
mod log_limit;
mod millis;
mod outcome;
mod panic_message;
mod progress;
mod relay;
mod retry;
mod sink;
mod source;
mod trace;
mod wakeup;

pub mod bus;
pub mod filter;
pub mod hub_store;
pub mod log;
pub mod metric_names;
pub mod outbox;

pub use backoff::{Backoff, RetryPolicy};
pub use bus_source::{BusItem, BusSource, BusSourceOptions, Decode, DecodeError, Decoded, GivenUp};
pub use claims::{ClaimToken, Claims};
pub use error::{BoxError, FaultKind, StoreError};
pub use event::{
    Delay, Event, EventBuilder, EventError, GLOBAL_AGGREGATE, IntoEvent, MAX_EVENT_ID, MAX_FIELD, MAX_HEADERS,
    MAX_PAYLOAD, Payload,
};
pub use load::{Load, parts};
pub use lock::lock;
pub use log_limit::LogLimit;
pub use outbox::{Interceptor, ListenerSink, Listeners, RegistrationError};
pub use outcome::{Disposition, Failure, FailureClass, Outcome, Settled};
pub use panic_message::panic_message;
pub use progress::{Progress, ProgressError};
pub use relay::{HotDeadline, HotPermit, HotQueue, Jitter, OnStop, Relay, RelayOptions};
pub use retry::decide;
pub use sink::{Delivery, Sink};
pub use source::{Claim, Claimed, Settlement, Source};
pub use trace::{TRACEPARENT, TraceContext};
pub use wakeup::{Signal, Wakeup};

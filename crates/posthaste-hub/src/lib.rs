//! The services of Posthaste: ingest, channels, subscriptions, event processor, outbox processor, dead letters.
//!
//! The only crate that sees more than one technology. Each service is one instance of the engine in `posthaste-core`;
//! [`Hub::start`] is where they are put together, and reads as the picture of the pipeline.

mod attempt_log;
mod channels;
mod credentials;
mod delivery;
mod depths;
mod dlt_intake;
mod envelope;
mod event_processor;
mod health;
mod hub;
mod ingest;
mod lag;
mod lanes;
mod letters;
mod readiness;
mod registrations;
mod relays;
mod domains;
mod secrets;
mod settings;
mod standstill;
mod matching;
mod subscription_input;
mod supervisor;
mod topics;
mod trace;
mod watched;

pub use channels::ChannelError;
pub use hub::{Hub, Parts, StartError};
pub use ingest::{Accepted, Ingest, IngestError};
pub use posthaste_sql::letters::{LetterCursor, LetterFilter, LetterSort, LetterSortKey, LetterStatus};
pub use posthaste_sql::registry::{Created, PageRequest, RegistryError, SubscriptionFilter};
pub use readiness::{PartStatus, Readiness};
pub use registrations::{Listed, RegistrationError, Registrations, Versioned};
pub use secrets::{Sealer, SecretError};
pub use settings::{DeliverySettings, DltSettings, OutboxSettings, RoutingRule, RoutingSettings, Settings, Violation};
pub use subscription_input::{SubscriptionReplacement, SubscriptionRequest};

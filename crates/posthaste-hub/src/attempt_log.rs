//! Log lines about failed attempts: a warning if a retry follows, an error if the attempt was the last one.
//!
//! Neither the payload nor the response of the endpoint is logged: a response may repeat the payload.

use std::borrow::Cow;
use std::time::Duration;

use posthaste_api::proto::{EventHubEvent, OutboxEvent};
use posthaste_core::bus::BUS_FAILURE;
use posthaste_core::hub_store::DeadLetter;
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{BusItem, Claimed, Disposition, Failure, LogLimit};

/// How many lines of each level one endpoint may cause within the window.
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// The fields of an item that are logged.
pub(crate) trait Described: Send + Sync + 'static {
    fn event_id(&self) -> &str;

    fn event_type(&self) -> &str;

    /// The subscription of the item, if it has one.
    fn subscription(&self) -> Option<&str> {
        None
    }

    /// The URL that the item is sent to. Items of one URL share a limit of lines. The URL is never logged.
    fn endpoint(&self) -> &str {
        ""
    }

    /// The number of the attempt. `counted` is the relay's own count.
    fn attempt(&self, counted: u32) -> u32 {
        counted
    }
}

/// Writes the lines, and suppresses those of an endpoint that causes too many.
pub(crate) struct AttemptLog {
    warnings: LogLimit,
    errors: LogLimit,
}

impl Default for AttemptLog {
    fn default() -> Self {
        Self { warnings: LogLimit::new(LINES, WINDOW), errors: LogLimit::new(LINES, WINDOW) }
    }
}

impl AttemptLog {
    pub(crate) fn settled<T: Described>(&self, relay: &str, claimed: &Claimed<T>, disposition: &Disposition) {
        let item = &claimed.item;
        let key = match item.endpoint() {
            "" => relay,
            endpoint => endpoint,
        };
        let (event_id, event_type) = (item.event_id(), item.event_type());
        let (subscription, attempt) = (item.subscription().unwrap_or_default(), item.attempt(claimed.attempt));
        // `suppressed` is how many lines of the same endpoint were left out before this one.
        macro_rules! line {
            ($level:ident, $failure:expr, $suppressed:expr, $message:literal) => {{
                let (reason, suppressed) = (reason($failure), $suppressed);
                tracing::$level!(relay, event_id, event_type, subscription, attempt, reason, suppressed, $message);
            }};
        }
        match disposition {
            Disposition::Retry { failure: Some(failure), .. } => {
                if let Some(suppressed) = self.warnings.allows(key) {
                    line!(warn, failure, suppressed, "an attempt failed and will be retried");
                }
            }
            Disposition::Dead(failure) => {
                if let Some(suppressed) = self.errors.allows(key) {
                    line!(error, failure, suppressed, "the last attempt failed");
                }
            }
            _ => {}
        }
    }
}

/// Code and message of a failure. The cause is left out if it is the response of the endpoint. So is a message that may
/// contain a URL with credentials.
fn reason(failure: &Failure) -> String {
    let message: Cow<'_, str> = match &*failure.code {
        "unbuildable" => "no request can be built from the envelope".into(),
        BUS_FAILURE => return failure.to_string(),
        _ => failure.message.as_str().into(),
    };
    format!("{}: {message}", failure.code)
}

impl Described for OutboxItem {
    fn event_id(&self) -> &str {
        self.event.id()
    }

    fn event_type(&self) -> &str {
        self.event.event_type()
    }
}

impl Described for BusItem<EventHubEvent> {
    fn event_id(&self) -> &str {
        &self.value.event_id
    }

    fn event_type(&self) -> &str {
        &self.value.event_type
    }
}

impl Described for BusItem<OutboxEvent> {
    fn event_id(&self) -> &str {
        self.value.event.as_ref().map_or("", |event| &event.event_id)
    }

    fn event_type(&self) -> &str {
        self.value.event.as_ref().map_or("", |event| &event.event_type)
    }

    fn subscription(&self) -> Option<&str> {
        Some(&self.value.subscription_id)
    }

    fn endpoint(&self) -> &str {
        &self.value.endpoint
    }
}

impl Described for DeadLetter {
    fn event_id(&self) -> &str {
        &self.fields.event_id
    }

    fn event_type(&self) -> &str {
        &self.fields.event_type
    }

    fn subscription(&self) -> Option<&str> {
        Some(&self.fields.subscription_id)
    }

    fn endpoint(&self) -> &str {
        &self.fields.endpoint
    }

    /// The number that the endpoint sees: the count continues from the immediate attempts.
    fn attempt(&self, _: u32) -> u32 {
        self.fields.attempts.saturating_add(1)
    }
}

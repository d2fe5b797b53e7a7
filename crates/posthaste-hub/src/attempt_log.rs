//! What the log says of failed attempts: a warning for each that is made again, an error for each that was the last.
//!
//! Neither the payload nor what the endpoint answered is logged: an answer may repeat the payload.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use posthaste_api::proto::{EventHubEvent, OutboxEvent};
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{BusItem, Claimed, Disposition, Failure};
use posthaste_sql::letters::Letter;
use tokio::time::Instant;

/// How many lines one endpoint may cause of each level in this time.
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);
/// How many endpoints are told apart. The others share one allowance.
const MANY: usize = 4_096;

/// What the log says of an item.
pub(crate) trait Described: Send + Sync + 'static {
    fn event_id(&self) -> &str;

    fn event_type(&self) -> &str;

    /// The subscription that it goes to, where it goes to one.
    fn subscription(&self) -> Option<&str>;

    /// Where it goes. What shares it shares an allowance of lines; it is never logged.
    fn endpoint(&self) -> &str;

    /// The number of the attempt, given that the relay's own count is this.
    fn attempt(&self, counted: u32) -> u32;
}

/// Writes the lines, and holds back what one endpoint would write too many of.
#[derive(Default)]
pub(crate) struct AttemptLog {
    warnings: Throttle,
    errors: Throttle,
}

impl AttemptLog {
    pub(crate) fn settled<T: Described>(&self, relay: &str, claimed: &Claimed<T>, disposition: &Disposition) {
        let item = &claimed.item;
        let key = match item.endpoint() {
            "" => relay,
            endpoint => endpoint,
        };
        let line = |failure: &Failure, suppressed: u64| Line {
            event_id: item.event_id().to_owned(),
            event_type: item.event_type().to_owned(),
            subscription: item.subscription().unwrap_or_default().to_owned(),
            attempt: item.attempt(claimed.attempt),
            reason: reason(failure),
            suppressed,
        };
        match disposition {
            Disposition::Retry { failure: Some(failure), .. } => {
                if let Some(suppressed) = self.warnings.admit(key, Instant::now()) {
                    let Line { event_id, event_type, subscription, attempt, reason, suppressed } =
                        line(failure, suppressed);
                    tracing::warn!(
                        relay,
                        event_id,
                        event_type,
                        subscription,
                        attempt,
                        reason,
                        suppressed,
                        "an attempt failed and will be made again"
                    );
                }
            }
            Disposition::Dead(failure) => {
                if let Some(suppressed) = self.errors.admit(key, Instant::now()) {
                    let Line { event_id, event_type, subscription, attempt, reason, suppressed } =
                        line(failure, suppressed);
                    tracing::error!(
                        relay,
                        event_id,
                        event_type,
                        subscription,
                        attempt,
                        reason,
                        suppressed,
                        "the last attempt failed: it is given up"
                    );
                }
            }
            _ => {}
        }
    }
}

struct Line {
    event_id: String,
    event_type: String,
    subscription: String,
    attempt: u32,
    reason: String,
    /// How many lines of the same endpoint were held back before this one.
    suppressed: u64,
}

/// Without the cause, which is what the endpoint answered, and without what may hold an address with credentials in it.
fn reason(failure: &Failure) -> String {
    let message: Cow<'_, str> = match &*failure.code {
        "unbuildable" => "no request can be made of the envelope".into(),
        _ => failure.message.as_str().into(),
    };
    format!("{}: {message}", failure.code)
}

/// Lets a few lines through for each key, and counts the others.
#[derive(Default)]
struct Throttle(Mutex<HashMap<String, Allowance>>);

struct Allowance {
    since: Instant,
    written: u32,
    suppressed: u64,
}

impl Throttle {
    /// `None` where the line is one too many; otherwise how many were held back since the last one.
    fn admit(&self, key: &str, now: Instant) -> Option<u64> {
        let mut allowances = self.lock();
        if allowances.len() >= MANY && !allowances.contains_key(key) {
            allowances.retain(|_, allowance| now - allowance.since < WINDOW);
        }
        let key = if allowances.len() >= MANY && !allowances.contains_key(key) { "" } else { key };
        let new = || Allowance { since: now, written: 0, suppressed: 0 };
        let allowance = match allowances.get_mut(key) {
            Some(allowance) => allowance,
            None => allowances.entry(key.to_owned()).or_insert_with(new),
        };
        if now - allowance.since >= WINDOW {
            (allowance.since, allowance.written) = (now, 0);
        }
        if allowance.written >= LINES {
            allowance.suppressed += 1;
            return None;
        }
        allowance.written += 1;
        Some(std::mem::take(&mut allowance.suppressed))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Allowance>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Described for OutboxItem {
    fn event_id(&self) -> &str {
        self.event.id()
    }

    fn event_type(&self) -> &str {
        self.event.event_type()
    }

    fn subscription(&self) -> Option<&str> {
        None
    }

    fn endpoint(&self) -> &str {
        ""
    }

    fn attempt(&self, counted: u32) -> u32 {
        counted
    }
}

impl Described for BusItem<EventHubEvent> {
    fn event_id(&self) -> &str {
        &self.value.event_id
    }

    fn event_type(&self) -> &str {
        &self.value.event_type
    }

    fn subscription(&self) -> Option<&str> {
        None
    }

    fn endpoint(&self) -> &str {
        ""
    }

    fn attempt(&self, counted: u32) -> u32 {
        counted
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

    fn attempt(&self, counted: u32) -> u32 {
        counted
    }
}

impl Described for Letter {
    fn event_id(&self) -> &str {
        &self.event_id
    }

    fn event_type(&self) -> &str {
        &self.event_type
    }

    fn subscription(&self) -> Option<&str> {
        Some(&self.subscription_id)
    }

    fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// As the endpoint sees it: counted on from the immediate attempts.
    fn attempt(&self, _: u32) -> u32 {
        self.attempts.saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_fails_often_is_told_in_few_lines_with_a_count_of_the_others() {
        let (throttle, start) = (Throttle::default(), Instant::now());
        let first: Vec<_> = (0..100).map(|_| throttle.admit("down", start)).collect();
        assert_eq!(first.iter().filter(|admitted| admitted.is_some()).count(), LINES as usize);
        assert_eq!(throttle.admit("other", start), Some(0), "each endpoint has its own allowance");
        assert_eq!(throttle.admit("down", start + WINDOW), Some(90));
        assert_eq!(throttle.admit("down", start + WINDOW), Some(0));
    }

    #[tokio::test(start_paused = true)]
    async fn many_endpoints_take_bounded_memory() {
        let (throttle, start) = (Throttle::default(), Instant::now());
        for number in 0..2 * MANY {
            throttle.admit(&number.to_string(), start);
        }
        assert!(throttle.lock().len() <= MANY + 1);
        throttle.admit("late", start + WINDOW);
        assert!(throttle.lock().len() < MANY);
    }
}

use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::Utc;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use metrics::Histogram;
use serde::de::DeserializeOwned;
use tracing::{Instrument, field};

use super::{OutboxItem, Unroutable};
use crate::trace::{TRACEPARENT, TraceContext};
use crate::{Delivery, Event, Failure, GLOBAL_AGGREGATE, Outcome, Sink, metric_names, panic_message};

type Listener = Arc<dyn Fn(Arc<Event>) -> BoxFuture<'static, Outcome> + Send + Sync>;

/// Functions of this process that receive events, one per aggregate type and event type.
#[derive(Clone, Default)]
pub struct Listeners {
    by_key: HashMap<(String, String), Listener>,
    interceptors: Vec<Arc<dyn Interceptor>>,
}

/// Code that runs around every listener: audit, logging, a tenant's context.
#[async_trait]
pub trait Interceptor: Send + Sync + 'static {
    /// Called before the listener, in the order of registration. A failure is the failure of the event: neither the
    /// listener nor the interceptors after this one are called.
    async fn before(&self, event: &Event) -> Result<(), Failure>;

    /// Called after the listener, in reverse order, if this one's `before` succeeded; with the failure, if there is
    /// one. A panic here changes nothing.
    async fn after(&self, event: &Event, failure: Option<&Failure>);
}

/// Why a listener was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    #[error("event type is empty: name the type that the listener is for")]
    /// The event type is empty.
    EmptyType,
    #[error("a listener for {event_type:?} of {aggregate_type:?} is registered already: there is one for each type")]
    /// There is a listener for these events already.
    Duplicate {
        /// The type of the aggregates.
        aggregate_type: String,
        /// The type of the events.
        event_type: String,
    },
}

impl Listeners {
    /// No listeners.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a listener for events that belong to no aggregate.
    ///
    /// It may return nothing, a `Result`, or an [`Outcome`] to snooze or to give up at once.
    pub fn on<F, R, O>(self, event_type: impl Into<String>, listener: F) -> Result<Self, RegistrationError>
    where
        F: Fn(Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.on_aggregate(GLOBAL_AGGREGATE, event_type, listener)
    }

    /// Registers a listener for events of aggregates of one type. See [`on`](Self::on).
    pub fn on_aggregate<F, R, O>(
        mut self,
        aggregate_type: impl Into<String>,
        event_type: impl Into<String>,
        listener: F,
    ) -> Result<Self, RegistrationError>
    where
        F: Fn(Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        let key = (aggregate_type.into(), event_type.into());
        if key.1.is_empty() {
            return Err(RegistrationError::EmptyType);
        }
        if self.by_key.contains_key(&key) {
            return Err(RegistrationError::Duplicate { aggregate_type: key.0, event_type: key.1 });
        }
        let listener: Listener = Arc::new(move |event| listener(event).map(Into::into).boxed());
        self.by_key.insert(key, listener);
        Ok(self)
    }

    /// Registers a listener that is given the payload as a `T`. An event whose payload is no `T` is dead at once: a
    /// retry would not change its payload.
    pub fn on_json<T, F, R, O>(self, event_type: impl Into<String>, listener: F) -> Result<Self, RegistrationError>
    where
        T: DeserializeOwned + Send,
        F: Fn(T, Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.on_aggregate_json(GLOBAL_AGGREGATE, event_type, listener)
    }

    /// The same for events of aggregates of one type.
    pub fn on_aggregate_json<T, F, R, O>(
        self,
        aggregate_type: impl Into<String>,
        event_type: impl Into<String>,
        listener: F,
    ) -> Result<Self, RegistrationError>
    where
        T: DeserializeOwned + Send,
        F: Fn(T, Arc<Event>) -> R + Send + Sync + 'static,
        R: Future<Output = O> + Send + 'static,
        O: Into<Outcome> + 'static,
    {
        self.on_aggregate(aggregate_type, event_type, move |event| {
            match serde_json::from_slice(event.payload().as_bytes()) {
                Ok(value) => listener(value, event).map(Into::into).left_future(),
                Err(error) => {
                    let failure =
                        Failure::permanent("payload", "the payload is not of the type that the listener expects");
                    ready(Outcome::Failed(failure.cause(error.to_string()))).right_future()
                }
            }
        })
    }

    /// Adds an interceptor, which runs around every listener.
    #[must_use]
    pub fn intercept(mut self, interceptor: impl Interceptor) -> Self {
        self.interceptors.push(Arc::new(interceptor));
        self
    }

    /// True if there are no listeners and no interceptors.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty() && self.interceptors.is_empty()
    }

    /// The sink that hands events to these listeners.
    pub fn into_sink(
        self,
        unroutable: Unroutable,
        trace: Option<Arc<dyn TraceContext>>,
        metrics_prefix: &str,
    ) -> ListenerSink {
        let latency = metrics::histogram!(metric_names::prefixed(metrics_prefix, metric_names::DISPATCH_LATENCY));
        ListenerSink { listeners: self, unroutable, trace, latency }
    }

    fn find(&self, event: &Event) -> Option<&Listener> {
        self.by_key.get(&(event.aggregate_type().to_owned(), event.event_type().to_owned()))
    }

    async fn call(&self, listener: &Listener, event: &Arc<Event>) -> Outcome {
        if self.interceptors.is_empty() {
            // The code that creates the future belongs to the listener, too, and may panic.
            return caught("the listener panicked", async { listener(event.clone()).await }).await;
        }
        let mut ready = 0;
        let mut outcome = Outcome::Delivered;
        for interceptor in &self.interceptors {
            outcome = caught("an interceptor panicked", interceptor.before(event)).await;
            if outcome != Outcome::Delivered {
                break;
            }
            ready += 1;
        }
        if ready == self.interceptors.len() {
            outcome = caught("the listener panicked", async { listener(event.clone()).await }).await;
        }
        let failure = match &outcome {
            Outcome::Failed(failure) => Some(failure),
            _ => None,
        };
        for interceptor in self.interceptors[..ready].iter().rev() {
            let after = caught("an interceptor panicked", interceptor.after(event, failure)).await;
            if let Outcome::Failed(failure) = after {
                tracing::warn!(event_id = event.id(), %failure, "an interceptor failed after a delivery");
            }
        }
        outcome
    }
}

/// Runs user code and returns its outcome. A panic is a failed attempt.
async fn caught<O: Into<Outcome>>(panicked: &str, code: impl Future<Output = O>) -> Outcome {
    match AssertUnwindSafe(code).catch_unwind().await {
        Ok(outcome) => outcome.into(),
        Err(panic) => Outcome::Failed(Failure::transient("panicked", panicked).cause(panic_message(&*panic))),
    }
}

/// How long an event that is left for other processes is snoozed.
const LEFT_FOR: Duration = Duration::from_secs(1);

/// [`Listeners`] as a sink for the events of an outbox.
pub struct ListenerSink {
    listeners: Listeners,
    unroutable: Unroutable,
    trace: Option<Arc<dyn TraceContext>>,
    /// From when an event occurred to its delivery.
    latency: Histogram,
}

impl ListenerSink {
    async fn deliver_one(&self, item: &OutboxItem, attempt: u32) -> Outcome {
        let event = &item.event;
        let Some(listener) = self.listeners.find(event) else {
            return self.unroutable(item);
        };
        let traceparent = event.header(TRACEPARENT);
        let span = tracing::info_span!(
            "deliver",
            event_id = event.id(),
            event_type = event.event_type(),
            attempt,
            traceparent,
            outcome = field::Empty
        );
        if let Some(trace) = &self.trace {
            trace.continue_in(&span, event.headers());
        }
        let outcome = self.listeners.call(listener, event).instrument(span.clone()).await;
        match &outcome {
            Outcome::Delivered => {
                span.record("outcome", "delivered");
                // If the writer's clock is ahead, the latency is unknown.
                if let Ok(latency) = (Utc::now() - event.occurred_at()).to_std() {
                    self.latency.record(latency.as_secs_f64());
                }
            }
            Outcome::Snoozed { .. } => drop(span.record("outcome", "snoozed")),
            Outcome::Failed(failure) => drop(span.record("outcome", field::display(failure))),
        }
        outcome
    }

    fn unroutable(&self, item: &OutboxItem) -> Outcome {
        let event = &item.event;
        if let Unroutable::Leave { grace } = self.unroutable
            && (Utc::now() - item.created_at).to_std().unwrap_or_default() < grace
        {
            return Outcome::Snoozed { wait: LEFT_FOR.min(grace) };
        }
        let message = format!("no listener for {:?} of {:?}", event.event_type(), event.aggregate_type());
        Outcome::Failed(Failure::permanent("unroutable", message))
    }
}

#[async_trait]
impl Sink for ListenerSink {
    type Item = OutboxItem;

    async fn deliver(&self, batch: Vec<Delivery<OutboxItem>>) {
        for delivery in batch {
            let outcome = self.deliver_one(delivery.item(), delivery.attempt()).await;
            delivery.report(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Claimed;

    async fn outcome_of(listeners: Listeners, event_type: &str) -> Outcome {
        outcome_of_event(listeners, Event::text(event_type, "{}").build().unwrap(), Unroutable::Dead).await
    }

    async fn outcome_of_event(listeners: Listeners, event: Event, unroutable: Unroutable) -> Outcome {
        let (delivery, outcome) = Delivery::detached(Claimed::new(OutboxItem::detached(event), 1, 0));
        listeners.into_sink(unroutable, None, "posthaste").deliver(vec![delivery]).await;
        outcome.await.unwrap()
    }

    #[tokio::test]
    async fn the_return_value_of_a_listener_is_the_outcome() {
        let listeners = Listeners::new()
            .on("plain", |_| async {})
            .unwrap()
            .on("failing", |_| async { Err::<(), _>(std::io::Error::other("no")) })
            .unwrap()
            .on("dead", |_| async { Outcome::Failed(Failure::permanent("rejected", "never")) })
            .unwrap();
        assert_eq!(outcome_of(listeners.clone(), "plain").await, Outcome::Delivered);
        let failing = Outcome::Failed(Failure::transient("listener_error", "no"));
        assert_eq!(outcome_of(listeners.clone(), "failing").await, failing);
        let dead = Outcome::Failed(Failure::permanent("rejected", "never"));
        assert_eq!(outcome_of(listeners, "dead").await, dead);
    }

    #[tokio::test]
    async fn a_panic_is_a_failed_attempt_and_no_listener_is_permanent() {
        let listeners =
            Listeners::new().on("bad", |event| async move { assert!(event.id().is_empty(), "boom") }).unwrap();
        let Outcome::Failed(failure) = outcome_of(listeners.clone(), "bad").await else { panic!("a failure") };
        assert_eq!((failure.code.as_ref(), failure.cause.as_deref()), ("panicked", Some("boom")));
        let Outcome::Failed(failure) = outcome_of(listeners, "other").await else { panic!("a failure") };
        assert_eq!((failure.code.as_ref(), failure.class), ("unroutable", crate::FailureClass::Permanent));
    }

    #[tokio::test]
    async fn a_typed_listener_gets_the_payload_or_the_event_is_dead() {
        #[derive(serde::Deserialize)]
        struct Order {
            id: u64,
        }
        let payload = |text: &str| Event::text("order", text).build().unwrap();
        let listeners = Listeners::new().on_json("order", |order: Order, event: Arc<Event>| async move {
            assert_eq!((order.id, event.event_type()), (7, "order"));
        });
        let listeners = listeners.unwrap();
        let accepted = outcome_of_event(listeners.clone(), payload(r#"{"id":7}"#), Unroutable::Dead).await;
        assert_eq!(accepted, Outcome::Delivered);
        let refused = outcome_of_event(listeners, payload("[]"), Unroutable::Dead).await;
        let Outcome::Failed(failure) = refused else { panic!("a failure") };
        assert_eq!((failure.code.as_ref(), failure.class), ("payload", crate::FailureClass::Permanent));
    }

    #[tokio::test]
    async fn an_event_without_a_listener_may_be_left_for_other_processes_for_a_while() {
        let young = Event::text("new.type", "{}").build().unwrap();
        let leave = Unroutable::Leave { grace: Duration::from_secs(60) };
        let outcome = outcome_of_event(Listeners::new(), young.clone(), leave).await;
        assert_eq!(outcome, Outcome::Snoozed { wait: LEFT_FOR });
        let over = Unroutable::Leave { grace: Duration::ZERO };
        assert!(matches!(outcome_of_event(Listeners::new(), young, over).await, Outcome::Failed(_)));
    }

    #[test]
    fn a_second_listener_for_a_key_is_refused() {
        let listeners = Listeners::new().on_aggregate("a:b", "c", |_| async {}).unwrap();
        let listeners = listeners.on_aggregate("a", "b:c", |_| async {}).unwrap();
        assert!(matches!(
            listeners.clone().on_aggregate("a", "b:c", |_| async {}),
            Err(RegistrationError::Duplicate { .. })
        ));
        assert!(matches!(listeners.on("", |_| async {}), Err(RegistrationError::EmptyType)));
    }
}

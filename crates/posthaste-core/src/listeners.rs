use std::collections::HashMap;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::{Delivery, Event, Failure, GLOBAL_AGGREGATE, Outcome, Sink};

type Listener = Arc<dyn Fn(Arc<Event>) -> BoxFuture<'static, Outcome> + Send + Sync>;

/// Functions of this process that events are handed to, one per aggregate type and event type.
#[derive(Clone, Default)]
pub struct Listeners {
    by_key: HashMap<(String, String), Listener>,
}

/// Why a listener was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    #[error("event type is empty: name the type that the listener is for")]
    EmptyType,
    #[error("a listener for {event_type:?} of {aggregate_type:?} is registered already: there is one for each type")]
    Duplicate { aggregate_type: String, event_type: String },
}

impl Listeners {
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

    /// The sink that hands items to these listeners.
    pub fn into_sink<T>(self) -> ListenerSink<T> {
        ListenerSink { listeners: self, item: PhantomData }
    }

    async fn call(&self, event: &Arc<Event>) -> Outcome {
        let key = (event.aggregate_type().to_owned(), event.event_type().to_owned());
        let Some(listener) = self.by_key.get(&key) else {
            let message = format!("no listener for {:?} of {:?}", key.1, key.0);
            return Outcome::Failed(Failure::permanent("unroutable", message));
        };
        // Creating the future is the listener's code, too.
        let called = AssertUnwindSafe(async { listener(event.clone()).await }).catch_unwind().await;
        called.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            Outcome::Failed(Failure::transient("panicked", "the listener panicked").cause(text))
        })
    }
}

/// [`Listeners`] as a sink for items that carry an event.
pub struct ListenerSink<T> {
    listeners: Listeners,
    item: PhantomData<fn(T)>,
}

#[async_trait]
impl<T: AsRef<Arc<Event>> + Send + Sync + 'static> Sink for ListenerSink<T> {
    type Item = T;

    async fn deliver(&self, batch: Vec<Delivery<T>>) {
        for delivery in batch {
            let outcome = self.listeners.call(delivery.item().as_ref()).await;
            delivery.report(outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Claimed;

    #[derive(Clone)]
    struct Item(Arc<Event>);

    impl AsRef<Arc<Event>> for Item {
        fn as_ref(&self) -> &Arc<Event> {
            &self.0
        }
    }

    async fn outcome_of(listeners: Listeners, event_type: &str) -> Outcome {
        let event = Event::builder(event_type).text("{}".to_owned()).build().unwrap();
        let (delivery, outcome) = Delivery::detached(Claimed::new(Item(Arc::new(event)), 1, 0));
        listeners.into_sink().deliver(vec![delivery]).await;
        outcome.await.unwrap()
    }

    #[tokio::test]
    async fn what_a_listener_returns_is_its_outcome() {
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

    #[test]
    fn one_listener_for_each_key() {
        let listeners = Listeners::new().on_aggregate("a:b", "c", |_| async {}).unwrap();
        let listeners = listeners.on_aggregate("a", "b:c", |_| async {}).unwrap();
        assert!(matches!(
            listeners.clone().on_aggregate("a", "b:c", |_| async {}),
            Err(RegistrationError::Duplicate { .. })
        ));
        assert!(matches!(listeners.on("", |_| async {}), Err(RegistrationError::EmptyType)));
    }
}

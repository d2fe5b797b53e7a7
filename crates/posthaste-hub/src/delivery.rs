use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::Utc;
use posthaste_api::proto::{EventHubEvent, OutboxEvent, PayloadType, event_hub_event};
use posthaste_api::{AuthIn, Secret};
use posthaste_core::{BusItem, Delivery, Failure, Outcome, Sink};
use posthaste_sql::letters::Letter;
use posthaste_webhook::{Auth, Client, Endpoint, Request};
use prost::Message;
use tokio::sync::Semaphore;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::registrations::open_auth;
use crate::secrets::{Sealer, SecretError};

/// How long a delivery waits for its lane before it is spilled to the dead letters, so that it does not take the room
/// of other subscribers.
const LANE_PATIENCE: Duration = Duration::from_secs(2);
/// Longer than the bus source keeps anything in memory.
const SPILL: Duration = Duration::from_secs(60);

/// Makes HTTP requests of deliveries. One lane per subscription bounds how many are under way.
#[derive(Clone)]
pub(crate) struct Postman {
    client: Client,
    sealer: Sealer,
    concurrency: usize,
    stopping: CancellationToken,
    lanes: Arc<Mutex<HashMap<String, Arc<Semaphore>>>>,
}

impl Postman {
    pub(crate) fn new(client: Client, sealer: Sealer, concurrency: usize, stopping: CancellationToken) -> Self {
        Self { client, sealer, concurrency: concurrency.max(1), stopping, lanes: Arc::default() }
    }

    /// Posts within the subscription's lane.
    async fn post(&self, message: &OutboxEvent, attempt: u32, limit: Option<Duration>) -> Outcome {
        let request = match self.request(message, attempt, limit) {
            Ok(request) => request,
            Err(failure) => return Outcome::Failed(failure),
        };
        let lane = self.lane(&message.subscription_id);
        tokio::select! {
            biased;
            // A stop waits for what is on the wire and starts nothing new.
            () = self.stopping.cancelled() => Outcome::Snoozed { wait: Duration::ZERO },
            Ok(_permit) = lane.acquire() => self.client.post(request).await,
            () = sleep(LANE_PATIENCE) => Outcome::Failed(
                Failure::outage("LANE_FULL", "the endpoint is slower than its traffic; nothing was sent yet")
                    .retry_after(SPILL),
            ),
        }
    }

    fn lane(&self, subscription_id: &str) -> Arc<Semaphore> {
        let mut lanes = self.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(lane) = lanes.get(subscription_id) {
            return lane.clone();
        }
        let lane = Arc::new(Semaphore::new(self.concurrency));
        lanes.insert(subscription_id.to_owned(), lane.clone());
        lane
    }

    fn request(&self, message: &OutboxEvent, attempt: u32, limit: Option<Duration>) -> Result<Request, Failure> {
        let unbuildable = |message: String| Failure::permanent("unbuildable", message);
        let event = message.event.as_ref().ok_or_else(|| unbuildable("the envelope has no event".to_owned()))?;
        let endpoint = Endpoint::parse(&message.endpoint).map_err(|error| unbuildable(error.to_string()))?;
        let body = body(event).ok_or_else(|| unbuildable("the event has no payload".to_owned()))?;
        let own_limit = message.timeout.as_ref().and_then(|timeout| Duration::try_from(*timeout).ok());
        Ok(Request {
            endpoint,
            body,
            content_type: content_type(message, event),
            headers: request_headers(message, event, attempt),
            auth: self.auth(message)?,
            timeout: limit.or(own_limit).unwrap_or(Duration::from_secs(1)),
        })
    }

    fn auth(&self, message: &OutboxEvent) -> Result<Auth, Failure> {
        // Not the subscriber's fault and not for ever: an operator can bring the key back.
        let closed =
            |error: SecretError| Failure::outage("sealed", "the credentials cannot be opened").cause(error.to_string());
        let auth = open_auth(&self.sealer, &message.subscription_id, &message.sealed_auth).map_err(closed)?;
        let exposed = |secret: Option<Secret>| secret.map(|secret| secret.expose().to_owned()).unwrap_or_default();
        Ok(match auth {
            AuthIn::None {} => Auth::None,
            AuthIn::BasicAuth { username, password } => Auth::Basic { username, password: exposed(password) },
            AuthIn::HeaderToken { token } | AuthIn::JwtHeader { token } => Auth::Bearer { token: exposed(token) },
        })
    }
}

fn body(event: &EventHubEvent) -> Option<Bytes> {
    match event.event.as_ref()? {
        event_hub_event::Event::JsonText(text) => Some(Bytes::copy_from_slice(text.as_bytes())),
        event_hub_event::Event::RawBytes(bytes) => Some(bytes.clone()),
        event_hub_event::Event::Any(any) => Some(Bytes::from(any.encode_to_vec())),
    }
}

/// The event's own type; the subscription's only where the event has none.
fn content_type(message: &OutboxEvent, event: &EventHubEvent) -> Cow<'static, str> {
    match (&event.content_type, message.payload_type()) {
        (Some(content_type), _) => Cow::Owned(content_type.clone()),
        (None, PayloadType::Binary) => Cow::Borrowed("application/octet-stream"),
        (None, _) => Cow::Borrowed("application/json"),
    }
}

fn request_headers(message: &OutboxEvent, event: &EventHubEvent, attempt: u32) -> Vec<(String, String)> {
    let mut headers = vec![
        ("webhook-id".to_owned(), event.event_id.clone()),
        ("webhook-timestamp".to_owned(), Utc::now().timestamp().to_string()),
        ("posthaste-event-type".to_owned(), event.event_type.clone()),
        ("posthaste-subscription-id".to_owned(), message.subscription_id.clone()),
        ("posthaste-attempt".to_owned(), attempt.to_string()),
    ];
    for header in &event.headers {
        if header.name.eq_ignore_ascii_case("traceparent") {
            headers.push(("traceparent".to_owned(), header.value.clone()));
        } else if is_token(&header.name) && is_field_value(&header.value) {
            headers.push((format!("posthaste-header-{}", header.name.to_ascii_lowercase()), header.value.clone()));
        }
    }
    headers.extend(message.headers.iter().map(|header| (header.name.clone(), header.value.clone())));
    headers
}

/// Whether a name may stand in an HTTP header.
fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

fn is_field_value(value: &str) -> bool {
    value.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte) || byte >= 0x80)
}

/// The outbox processor's sink: fresh deliveries from the domain topics.
pub(crate) struct FreshDeliveries(pub(crate) Postman);

#[async_trait]
impl Sink for FreshDeliveries {
    type Item = BusItem<OutboxEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        // Each goes its own way: the relay bounds how many there are, and none waits for its neighbour.
        for delivery in batch {
            let postman = self.0.clone();
            tokio::spawn(async move {
                let message = delivery.item().value.clone();
                let outcome = postman.post(&message, delivery.attempt(), None).await;
                delivery.report(outcome);
            });
        }
    }
}

/// The dead-letter retry's sink: scheduled and replayed letters, with a limit of their own.
pub(crate) struct LetterDeliveries {
    pub(crate) postman: Postman,
    pub(crate) timeout: Duration,
}

#[async_trait]
impl Sink for LetterDeliveries {
    type Item = Letter;

    async fn deliver(&self, batch: Vec<Delivery<Letter>>) {
        for delivery in batch {
            let postman = self.postman.clone();
            let limit = self.timeout;
            tokio::spawn(async move {
                let letter = delivery.item();
                let outcome = match OutboxEvent::decode(letter.envelope.clone()) {
                    Ok(message) => postman.post(&message, letter.attempts + 1, Some(limit)).await,
                    Err(error) => Outcome::Failed(
                        Failure::permanent("undecodable", "the letter's envelope cannot be read")
                            .cause(error.to_string()),
                    ),
                };
                delivery.report(outcome);
            });
        }
    }
}

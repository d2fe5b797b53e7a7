use std::borrow::Cow;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::Utc;
use posthaste_api::proto::{EventHubEvent, OutboxEvent, PayloadType, event_hub_event};
use posthaste_api::{AuthIn, Secret};
use posthaste_core::hub_store::DeadLetter;
use posthaste_core::{BusItem, Delivery, Failure, Outcome, Sink};
use posthaste_webhook::{Auth, Client, Endpoint, Request};
use prost::Message;
use tokio_util::sync::CancellationToken;

use crate::credentials::Credentials;
use crate::lanes::{Admission, LanePlace, Lanes};
use crate::secrets::{Sealer, SecretError};

/// The maximum size of the event's own headers in a request: endpoints refuse more than a few kilobytes.
const MAX_FORWARDED: usize = 64;
const MAX_FORWARDED_BYTES: usize = 4_096;

/// Sends deliveries as HTTP requests, each in the lane of its subscription.
#[derive(Clone)]
pub(crate) struct WebhookDispatcher {
    client: Client,
    sealer: Sealer,
    lanes: Lanes,
    stopping: CancellationToken,
}

/// Nothing was sent.
const NOT_NOW: Outcome = Outcome::Snoozed { wait: Duration::ZERO };

/// The lane has no room, so nothing was sent.
fn lane_full() -> Outcome {
    Outcome::Failed(Failure::outage(
        "LANE_FULL",
        "the endpoint is slower than its traffic or does not respond; nothing was sent",
    ))
}

impl WebhookDispatcher {
    pub(crate) fn new(client: Client, sealer: Sealer, lanes: Lanes, stopping: CancellationToken) -> Self {
        Self { client, sealer, lanes, stopping }
    }

    /// Sends the request of a delivery. Returns `None` if the lane had no permit in time.
    async fn post<T>(
        &self,
        delivery: &Delivery<T>,
        place: LanePlace,
        message: &OutboxEvent,
        attempt: u32,
        at_least: Duration,
    ) -> Option<Outcome> {
        let permit = tokio::select! {
            biased;
            // During a stop, requests in flight finish and no new ones are sent.
            () = self.stopping.cancelled() => return Some(NOT_NOW),
            permit = place.acquire() => permit,
        };
        // Also without a permit: after its lease, another process may have delivered it, and a dead letter would deliver it
        // again.
        if !delivery.may_start() {
            return Some(NOT_NOW);
        }
        let permit = permit?;
        // Made now and not before the wait for the permit, because it copies the payload.
        let request = match self.request(message, attempt, at_least) {
            Ok(request) => request,
            Err(failure) => return Some(Outcome::Failed(failure)),
        };
        let exchange = self.client.exchange(request).await;
        if let Some(response) = exchange.response {
            permit.ended(response);
        }
        Some(exchange.outcome)
    }

    fn request(&self, message: &OutboxEvent, attempt: u32, at_least: Duration) -> Result<Request, Failure> {
        let unbuildable = |message: String| Failure::permanent("unbuildable", message);
        let event = message.event.as_ref().ok_or_else(|| unbuildable("the envelope has no event".to_owned()))?;
        let credentials = self.credentials(message)?;
        let address = credentials.endpoint.as_deref().unwrap_or(&message.endpoint);
        let endpoint = Endpoint::parse(address).map_err(|error| unbuildable(error.to_string()))?;
        let body = body(event).ok_or_else(|| unbuildable("the event has no payload".to_owned()))?;
        let own_limit = message.timeout.as_ref().and_then(|timeout| Duration::try_from(*timeout).ok());
        Ok(Request {
            endpoint,
            body,
            content_type: content_type(message, event),
            headers: request_headers(message, event, attempt, credentials.headers),
            auth: sent_auth(credentials.auth),
            timeout: own_limit.unwrap_or_default().max(at_least),
        })
    }

    fn credentials(&self, message: &OutboxEvent) -> Result<Credentials, Failure> {
        // An outage: the subscriber did not cause it, and an operator can restore the key.
        let closed =
            |error: SecretError| Failure::outage("sealed", "the credentials cannot be opened").cause(error.to_string());
        Credentials::open(&self.sealer, &message.subscription_id, &message.sealed_credentials).map_err(closed)
    }
}

fn sent_auth(auth: AuthIn) -> Auth {
    let exposed = |secret: Option<Secret>| secret.map(|secret| secret.expose().to_owned()).unwrap_or_default();
    match auth {
        AuthIn::None {} => Auth::None,
        AuthIn::BasicAuth { username, password } => Auth::Basic { username, password: exposed(password) },
        AuthIn::HeaderToken { token } | AuthIn::JwtHeader { token } => Auth::Bearer { token: exposed(token) },
    }
}

fn body(event: &EventHubEvent) -> Option<Bytes> {
    match event.event.as_ref()? {
        event_hub_event::Event::JsonText(text) => Some(Bytes::copy_from_slice(text.as_bytes())),
        event_hub_event::Event::RawBytes(bytes) => Some(bytes.clone()),
        event_hub_event::Event::Any(any) => Some(Bytes::from(any.encode_to_vec())),
    }
}

/// The content type of the event, or that of the subscription if the event has none.
fn content_type(message: &OutboxEvent, event: &EventHubEvent) -> Cow<'static, str> {
    match (&event.content_type, message.payload_type()) {
        (Some(content_type), _) => Cow::Owned(content_type.clone()),
        (None, PayloadType::Binary) => Cow::Borrowed("application/octet-stream"),
        (None, _) => Cow::Borrowed("application/json"),
    }
}

fn request_headers(
    message: &OutboxEvent,
    event: &EventHubEvent,
    attempt: u32,
    own: Vec<(String, String)>,
) -> Vec<(String, String)> {
    let mut headers = vec![
        ("webhook-id".to_owned(), event.event_id.clone()),
        ("webhook-timestamp".to_owned(), Utc::now().timestamp().to_string()),
        ("posthaste-event-type".to_owned(), event.event_type.clone()),
        ("posthaste-subscription-id".to_owned(), message.subscription_id.clone()),
        ("posthaste-attempt".to_owned(), attempt.to_string()),
    ];
    let mut room = MAX_FORWARDED_BYTES;
    let writable = event.headers.iter().filter(|header| is_token(&header.name) && is_field_value(&header.value));
    for header in writable.take(MAX_FORWARDED) {
        let name = match header.name.to_ascii_lowercase().as_str() {
            "traceparent" => "traceparent".to_owned(),
            name => format!("posthaste-header-{name}"),
        };
        let Some(left) = room.checked_sub(name.len() + header.value.len()) else { break };
        room = left;
        headers.push((name, header.value.clone()));
    }
    headers.extend(own);
    headers
}

/// True if the text can be the name of an HTTP header.
fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

fn is_field_value(value: &str) -> bool {
    value.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte) || byte >= 0x80)
}

/// The outbox processor's sink: fresh deliveries from the domain topics.
pub(crate) struct FreshDeliveries(pub(crate) WebhookDispatcher);

#[async_trait]
impl Sink for FreshDeliveries {
    type Item = BusItem<OutboxEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        // Deliveries run concurrently and do not wait for each other. The relay bounds their number.
        for delivery in batch {
            let message = delivery.item().value.clone();
            let place = match self.0.lanes.admit(&message.subscription_id, delivery.bytes()) {
                Admission::Admitted(place) => place,
                Admission::Postponed(wait) => {
                    delivery.report(Outcome::Snoozed { wait });
                    continue;
                }
                Admission::Refused => {
                    delivery.report(lane_full());
                    continue;
                }
            };
            let dispatcher = self.0.clone();
            tokio::spawn(async move {
                let outcome = dispatcher.post(&delivery, place, &message, delivery.attempt(), Duration::ZERO).await;
                delivery.report(outcome.unwrap_or_else(lane_full));
            });
        }
    }
}

/// The sink of the dead-letter retry: scheduled and replayed dead letters. Their timeout is at least `timeout`.
pub(crate) struct DeadLetterDeliveries {
    pub(crate) dispatcher: WebhookDispatcher,
    pub(crate) timeout: Duration,
}

#[async_trait]
impl Sink for DeadLetterDeliveries {
    type Item = DeadLetter;

    async fn deliver(&self, batch: Vec<Delivery<DeadLetter>>) {
        for delivery in batch {
            let dispatcher = self.dispatcher.clone();
            let at_least = self.timeout;
            let place = dispatcher.lanes.admit_dead_letter(&delivery.item().fields.subscription_id);
            tokio::spawn(async move {
                let letter = delivery.item();
                let outcome = match OutboxEvent::decode(letter.envelope.clone()) {
                    Ok(message) => {
                        dispatcher.post(&delivery, place, &message, letter.fields.attempts + 1, at_least).await
                    }
                    Err(error) => Some(Outcome::Failed(
                        Failure::permanent("undecodable", "the envelope of the dead letter cannot be read")
                            .cause(error.to_string()),
                    )),
                };
                // Without a permit it stays due, and is claimed again when its lane has room.
                delivery.report(outcome.unwrap_or(NOT_NOW));
            });
        }
    }
}

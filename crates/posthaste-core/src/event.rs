use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::Serialize;
use ulid::Generator;

use crate::lock;
use crate::trace::TRACEPARENT;

/// The aggregate type of events that name none.
pub const GLOBAL_AGGREGATE: &str = "__GLOBAL__";
/// The largest payload, in bytes.
pub const MAX_PAYLOAD: usize = 1_048_576;
/// The largest sum of header names and values, in bytes.
pub const MAX_HEADERS: usize = 65_536;
/// The longest event id, in characters.
pub const MAX_EVENT_ID: usize = 128;
/// The longest event type, aggregate type, aggregate id, tenant id, source service, resource type, operation type and
/// content type, in characters: what every database can keep in a column and, where it has to, in an index.
pub const MAX_FIELD: usize = 255;

/// Something that happened, as its writer described it. Immutable once built.
#[derive(Clone, PartialEq)]
pub struct Event {
    fields: EventBuilder,
    id: String,
    payload: Payload,
    occurred_at: DateTime<Utc>,
}

/// The body of an event, kept byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Text, JSON as a rule.
    Text(String),
    /// Anything else.
    Bytes(Bytes),
}

impl Payload {
    /// The bytes, of text in UTF-8.
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }

    /// The bytes, without a copy.
    pub fn into_bytes(self) -> Bytes {
        match self {
            Self::Text(text) => Bytes::from(text),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// When an event may first be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// At once.
    None,
    /// Not before this time.
    Until(DateTime<Utc>),
    /// Counted from the database's clock at insert.
    For(Duration),
}

/// Why an event cannot be built; nothing has been written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    #[error("event type is empty: give every event a type, such as \"order.placed\"")]
    /// It has no type.
    EmptyType,
    #[error("payload is missing: give text or bytes (an empty JSON object is `{{}}`)")]
    /// It has no payload.
    NoPayload,
    #[error("payload is given twice: give text or bytes, not both")]
    /// It has a text and bytes.
    TwoPayloads,
    #[error("payload has {0} bytes, more than {MAX_PAYLOAD}: store it elsewhere and send a reference")]
    /// Its payload is too large; with its size.
    PayloadTooLarge(usize),
    #[error("headers have {0} bytes, more than {MAX_HEADERS}: move data into the payload")]
    /// Its headers are too large; with their size.
    HeadersTooLarge(usize),
    #[error("header name is empty: name every header")]
    /// A header has no name.
    EmptyHeaderName,
    #[error("event id {0:?} is not 1 to {MAX_EVENT_ID} characters of A-Z a-z 0-9 . _ : -")]
    /// Its id has a wrong form.
    BadId(String),
    #[error("available_at and deliver_after are both given: give one of them")]
    /// It has two delays.
    TwoDelays,
    #[error("deliver_after is zero: give a positive duration, or none to deliver at once")]
    /// Its delay is zero.
    ZeroDelay,
    #[error("available_at {available_at} is before occurred_at {occurred_at}")]
    /// It would be available before it occurred.
    AvailableBeforeOccurred {
        /// When it may first be delivered.
        available_at: DateTime<Utc>,
        /// When it occurred.
        occurred_at: DateTime<Utc>,
    },
    #[error(
        "{field} has {length} characters, more than {MAX_FIELD}: give a shorter one, or move data into the payload"
    )]
    /// One of its short texts is too long.
    TooLong {
        /// The field in question.
        field: &'static str,
        /// How many characters it has.
        length: usize,
    },
    #[error("{field} contains the character U+0000, which not every database keeps in a text: remove it")]
    /// One of its short texts contains U+0000; payloads and headers may.
    Nul {
        /// The field in question.
        field: &'static str,
    },
    #[error("payload cannot be written as JSON: {0}")]
    /// Its payload cannot be written as JSON; with the reason.
    Json(String),
}

impl Event {
    /// Begins an event of this type, which has 1 to [`MAX_FIELD`] characters.
    pub fn builder(event_type: impl Into<String>) -> EventBuilder {
        EventBuilder {
            event_type: event_type.into(),
            id: None,
            aggregate_type: GLOBAL_AGGREGATE.to_owned(),
            aggregate_id: None,
            tenant_id: None,
            source_service: None,
            resource_type: None,
            operation_type: None,
            headers: Vec::new(),
            content_type: None,
            text: None,
            bytes: None,
            occurred_at: None,
            available_at: None,
            deliver_after: None,
        }
    }

    /// An event whose payload is `value` as JSON. Write it as it is, or set more fields first.
    pub fn json(event_type: impl Into<String>, value: &impl Serialize) -> Result<EventBuilder, EventError> {
        let text = serde_json::to_string(value).map_err(|error| EventError::Json(error.to_string()))?;
        Ok(Self::text(event_type, text))
    }

    /// An event whose payload is this text, JSON as a rule. Write it as it is, or set more fields first.
    pub fn text(event_type: impl Into<String>, text: impl Into<String>) -> EventBuilder {
        Self::builder(event_type).text(text.into())
    }

    /// The same event with the headers of a trace, unless it has its own.
    pub(crate) fn carrying(mut self, trace: &[(String, String)]) -> Self {
        let has_its_own = self.fields.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(TRACEPARENT));
        if !has_its_own {
            self.fields.headers.extend_from_slice(trace);
        }
        self
    }

    /// The unique id of the event.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The type of the event, such as `order.placed`.
    pub fn event_type(&self) -> &str {
        &self.fields.event_type
    }

    /// The type of the aggregate that the event is about; [`GLOBAL_AGGREGATE`] if there is none.
    pub fn aggregate_type(&self) -> &str {
        &self.fields.aggregate_type
    }

    /// The id of the aggregate that the event is about.
    pub fn aggregate_id(&self) -> Option<&str> {
        self.fields.aggregate_id.as_deref()
    }

    /// The tenant that the event belongs to.
    pub fn tenant_id(&self) -> Option<&str> {
        self.fields.tenant_id.as_deref()
    }

    /// The service that the event comes from.
    pub fn source_service(&self) -> Option<&str> {
        self.fields.source_service.as_deref()
    }

    /// The type of the resource that the event is about, for the hub.
    pub fn resource_type(&self) -> Option<&str> {
        self.fields.resource_type.as_deref()
    }

    /// The operation on the resource, for the hub.
    pub fn operation_type(&self) -> Option<&str> {
        self.fields.operation_type.as_deref()
    }

    /// Names and values, in the order in which they were given.
    pub fn headers(&self) -> &[(String, String)] {
        &self.fields.headers
    }

    /// The value of the first header with this name, in upper or lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.fields.headers.iter().find(|(header, _)| header.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// The content type of the payload, such as `application/json`.
    pub fn content_type(&self) -> Option<&str> {
        self.fields.content_type.as_deref()
    }

    /// The body of the event.
    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// The caller's time; it has no effect on when or in which order the event is delivered.
    pub fn occurred_at(&self) -> DateTime<Utc> {
        self.occurred_at
    }

    /// When it may first be delivered.
    pub fn delay(&self) -> Delay {
        match (self.fields.available_at, self.fields.deliver_after) {
            (Some(at), _) if at > self.occurred_at => Delay::Until(at),
            (_, Some(wait)) => Delay::For(wait),
            _ => Delay::None,
        }
    }

    /// True if the event must not be delivered at once.
    pub fn is_delayed(&self) -> bool {
        self.delay() != Delay::None
    }

    /// The approximate size of the event in memory, in bytes.
    pub fn weight(&self) -> usize {
        let headers: usize = self.fields.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.payload.as_bytes().len() + headers + 256
    }
}

impl fmt::Debug for Event {
    /// Prints the fields that help to find the event, never the payload.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("id", &self.id)
            .field("event_type", &self.fields.event_type)
            .field("aggregate_type", &self.fields.aggregate_type)
            .field("aggregate_id", &self.fields.aggregate_id)
            .field("delay", &self.delay())
            .finish_non_exhaustive()
    }
}

/// A value that can be written: an event, or a builder that makes one.
pub trait IntoEvent: Send {
    /// Returns the event, or the reason why it is invalid.
    fn into_event(self) -> Result<Event, EventError>;
}

impl IntoEvent for Event {
    fn into_event(self) -> Result<Event, EventError> {
        Ok(self)
    }
}

impl IntoEvent for &Event {
    fn into_event(self) -> Result<Event, EventError> {
        Ok(self.clone())
    }
}

impl IntoEvent for EventBuilder {
    fn into_event(self) -> Result<Event, EventError> {
        self.build()
    }
}

/// Gathers the fields of an [`Event`]; only the type and one payload are required.
#[derive(Clone, PartialEq)]
pub struct EventBuilder {
    event_type: String,
    id: Option<String>,
    aggregate_type: String,
    aggregate_id: Option<String>,
    tenant_id: Option<String>,
    source_service: Option<String>,
    resource_type: Option<String>,
    operation_type: Option<String>,
    headers: Vec<(String, String)>,
    content_type: Option<String>,
    text: Option<String>,
    bytes: Option<Bytes>,
    occurred_at: Option<DateTime<Utc>>,
    available_at: Option<DateTime<Utc>>,
    deliver_after: Option<Duration>,
}

macro_rules! optional_setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, value: impl Into<Option<$type>>) -> Self {
            self.$name = value.into();
            self
        }
    )*};
}

impl EventBuilder {
    optional_setters! {
        /// The caller's own id, at most [`MAX_EVENT_ID`] characters of `A-Z a-z 0-9 . _ : -`. Default: a new ULID.
        id: String,
        /// The id of the aggregate; see also [`aggregate`](Self::aggregate). At most [`MAX_FIELD`] characters.
        aggregate_id: String,
        /// The tenant that the event belongs to. At most [`MAX_FIELD`] characters.
        tenant_id: String,
        /// The service that the event comes from. At most [`MAX_FIELD`] characters.
        source_service: String,
        /// The type of the resource that the event is about, for the hub. At most [`MAX_FIELD`] characters.
        resource_type: String,
        /// The operation on the resource, for the hub. At most [`MAX_FIELD`] characters.
        operation_type: String,
        /// The content type of the payload, such as `application/json`. At most [`MAX_FIELD`] characters.
        content_type: String,
        /// The payload, as text. At most [`MAX_PAYLOAD`] bytes.
        text: String,
        /// The payload, as bytes. At most [`MAX_PAYLOAD`] of them.
        bytes: Bytes,
        /// When it happened. Default: now.
        occurred_at: DateTime<Utc>,
        /// Not to be delivered before this time.
        available_at: DateTime<Utc>,
        /// Not to be delivered before this much time has passed.
        deliver_after: Duration,
    }

    #[must_use]
    /// The type of the aggregate; see also [`aggregate`](Self::aggregate). At most [`MAX_FIELD`] characters.
    pub fn aggregate_type(mut self, aggregate_type: impl Into<String>) -> Self {
        self.aggregate_type = aggregate_type.into();
        self
    }

    /// The aggregate that the event is about: events of one aggregate can be delivered in order. Type and id have at
    /// most [`MAX_FIELD`] characters each.
    #[must_use]
    pub fn aggregate(self, aggregate_type: impl Into<String>, aggregate_id: impl ToString) -> Self {
        self.aggregate_type(aggregate_type).aggregate_id(aggregate_id.to_string())
    }

    #[must_use]
    /// Adds a header. The names and values of all of them have at most [`MAX_HEADERS`] bytes.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    #[must_use]
    /// Adds headers.
    pub fn headers(mut self, headers: impl IntoIterator<Item = (String, String)>) -> Self {
        self.headers.extend(headers);
        self
    }

    /// Returns the event, or the reason why it is invalid.
    pub fn build(mut self) -> Result<Event, EventError> {
        if self.event_type.is_empty() {
            return Err(EventError::EmptyType);
        }
        let payload = match (self.text.take(), self.bytes.take()) {
            (Some(text), None) => Payload::Text(text),
            (None, Some(bytes)) => Payload::Bytes(bytes),
            (None, None) => return Err(EventError::NoPayload),
            (Some(_), Some(_)) => return Err(EventError::TwoPayloads),
        };
        if payload.as_bytes().len() > MAX_PAYLOAD {
            return Err(EventError::PayloadTooLarge(payload.as_bytes().len()));
        }
        self.check_headers()?;
        self.check_fields()?;
        let occurred_at = self.occurred_at.unwrap_or_else(Utc::now);
        self.check_delay(occurred_at)?;
        let id = match self.id.take() {
            None => next_id(),
            Some(id) if is_valid_id(&id) => id,
            Some(id) => return Err(EventError::BadId(id.chars().take(MAX_EVENT_ID + 1).collect())),
        };
        Ok(Event { fields: self, id, payload, occurred_at })
    }

    /// Checks the short texts, which databases keep in columns of their own.
    fn check_fields(&self) -> Result<(), EventError> {
        let fields = [
            ("event_type", Some(&self.event_type)),
            ("aggregate_type", Some(&self.aggregate_type)),
            ("aggregate_id", self.aggregate_id.as_ref()),
            ("tenant_id", self.tenant_id.as_ref()),
            ("source_service", self.source_service.as_ref()),
            ("resource_type", self.resource_type.as_ref()),
            ("operation_type", self.operation_type.as_ref()),
            ("content_type", self.content_type.as_ref()),
        ];
        for (field, text) in fields.into_iter().filter_map(|(field, text)| Some((field, text?))) {
            // No text has more characters than bytes.
            let length = if text.len() <= MAX_FIELD { text.len() } else { text.chars().count() };
            if length > MAX_FIELD {
                return Err(EventError::TooLong { field, length });
            }
            if text.contains('\0') {
                return Err(EventError::Nul { field });
            }
        }
        Ok(())
    }

    fn check_headers(&self) -> Result<(), EventError> {
        let size = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if size > MAX_HEADERS {
            return Err(EventError::HeadersTooLarge(size));
        }
        match self.headers.iter().any(|(name, _)| name.is_empty()) {
            true => Err(EventError::EmptyHeaderName),
            false => Ok(()),
        }
    }

    fn check_delay(&self, occurred_at: DateTime<Utc>) -> Result<(), EventError> {
        match (self.available_at, self.deliver_after) {
            (Some(_), Some(_)) => Err(EventError::TwoDelays),
            (_, Some(Duration::ZERO)) => Err(EventError::ZeroDelay),
            // Without an occurred_at of the caller's, a time that has just passed is simply "now".
            (Some(available_at), None) if self.occurred_at.is_some() && available_at < occurred_at => {
                Err(EventError::AvailableBeforeOccurred { available_at, occurred_at })
            }
            _ => Ok(()),
        }
    }
}

fn is_valid_id(id: &str) -> bool {
    (1..=MAX_EVENT_ID).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b':' | b'-'))
}

/// Ids ascend within a process even inside one millisecond, so that sorting by id sorts by creation.
pub(crate) fn next_id() -> String {
    static GENERATOR: Mutex<Generator> = Mutex::new(Generator::new());
    let mut generator = lock(&GENERATOR);
    loop {
        // The generator refuses only when 2^80 ids were drawn within one millisecond.
        if let Ok(id) = generator.generate() {
            return id.to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> EventBuilder {
        Event::builder("order.placed").text("{}".to_owned())
    }

    #[test]
    fn only_type_and_payload_are_required() {
        let event = event().build().unwrap();
        assert_eq!(event.id().len(), 26);
        assert_eq!(event.aggregate_type(), GLOBAL_AGGREGATE);
        assert_eq!((event.aggregate_id(), event.tenant_id()), (None, None));
        assert!(event.headers().is_empty() && !event.is_delayed());
    }

    #[test]
    fn ids_ascend_and_are_unique() {
        let ids: Vec<String> = (0..1_000).map(|_| next_id()).collect();
        assert!(ids.is_sorted() && ids.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn the_payload_limit_is_counted_in_bytes() {
        let of = |text: String| Event::builder("t").text(text).build();
        assert!(of("é".repeat(MAX_PAYLOAD / 2)).is_ok());
        assert_eq!(of("é".repeat(MAX_PAYLOAD / 2) + "x").unwrap_err(), EventError::PayloadTooLarge(MAX_PAYLOAD + 1));
        let bytes = Event::builder("t").bytes(Bytes::from(vec![0; MAX_PAYLOAD + 1])).build();
        assert_eq!(bytes.unwrap_err(), EventError::PayloadTooLarge(MAX_PAYLOAD + 1));
    }

    #[test]
    fn each_kind_of_bad_input_has_its_own_error() {
        assert_eq!(Event::builder("").text("{}".to_owned()).build().unwrap_err(), EventError::EmptyType);
        assert_eq!(Event::builder("t").build().unwrap_err(), EventError::NoPayload);
        assert_eq!(event().bytes(Bytes::new()).build().unwrap_err(), EventError::TwoPayloads);
        assert_eq!(event().header("", "x").build().unwrap_err(), EventError::EmptyHeaderName);
        assert!(matches!(event().id("a b".to_owned()).build().unwrap_err(), EventError::BadId(_)));
        assert!(matches!(event().id("x".repeat(129)).build().unwrap_err(), EventError::BadId(_)));
        let too_large = event().header("h", "x".repeat(MAX_HEADERS)).build();
        assert_eq!(too_large.unwrap_err(), EventError::HeadersTooLarge(MAX_HEADERS + 1));
    }

    #[test]
    fn a_delay_is_either_a_time_or_a_duration_and_lies_in_the_future() {
        let now = Utc::now();
        let later = now + Duration::from_secs(60);
        let both = event().available_at(later).deliver_after(Duration::from_secs(1)).build();
        assert_eq!(both.unwrap_err(), EventError::TwoDelays);
        assert_eq!(event().deliver_after(Duration::ZERO).build().unwrap_err(), EventError::ZeroDelay);
        let early = event().occurred_at(later).available_at(now).build();
        assert!(matches!(early.unwrap_err(), EventError::AvailableBeforeOccurred { .. }));
        let until = event().occurred_at(now).available_at(later).build().unwrap();
        assert_eq!(until.delay(), Delay::Until(later));
        assert!(!event().occurred_at(now).available_at(now).build().unwrap().is_delayed());
    }

    #[test]
    fn the_payload_is_not_in_the_debug_text() {
        let event = Event::builder("t").text("secret".to_owned()).build().unwrap();
        assert!(!format!("{event:?}").contains("secret"));
    }
}

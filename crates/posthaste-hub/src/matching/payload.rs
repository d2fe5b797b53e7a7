use std::cell::OnceCell;

use posthaste_api::proto::EventHubEvent;
use posthaste_api::proto::event_hub_event::Event;
use posthaste_core::filter::Json;

/// The payload of an event as JSON, which is read when the first filter asks for it, and once.
pub(super) struct Payload<'a> {
    event: &'a EventHubEvent,
    json: OnceCell<Option<Json<'a>>>,
}

impl<'a> Payload<'a> {
    pub(super) fn new(event: &'a EventHubEvent) -> Self {
        Self { event, json: OnceCell::new() }
    }

    /// `None` if the payload is not JSON.
    pub(super) fn json(&self) -> Option<&Json<'a>> {
        self.json.get_or_init(|| Json::parse(text(self.event)?)).as_ref()
    }
}

/// The bytes that may be JSON: a text, or bytes whose content type says so or is absent.
fn text(event: &EventHubEvent) -> Option<&[u8]> {
    match event.event.as_ref()? {
        Event::JsonText(text) => Some(text.as_bytes()),
        Event::RawBytes(bytes) => event.content_type.as_deref().is_none_or(is_json).then_some(&bytes[..]),
        Event::Any(_) => None,
    }
}

/// True for `application/json` and for types such as `application/cloudevents+json; charset=utf-8`.
fn is_json(content_type: &str) -> bool {
    let media_type = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    media_type == "application/json" || media_type.ends_with("+json")
}

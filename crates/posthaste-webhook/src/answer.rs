use std::time::{Duration, SystemTime};

use hyper::header::RETRY_AFTER;
use hyper::{Response, StatusCode};
use posthaste_core::{Failure, FailureClass, Outcome};

use crate::client::ResponseKind;
use crate::redact::Secrets;
use crate::request::Request;
use crate::retry_after;

/// How much of a refusal's body an operator sees, in bytes.
const MAX_CAUSE: usize = 1_024;

/// The head of a subscriber's response, which decides about the delivery.
#[derive(Clone, Copy)]
pub(crate) struct Answer {
    status: StatusCode,
    retry_after: Option<Duration>,
}

impl Answer {
    pub(crate) fn of<B>(response: &Response<B>) -> Self {
        let status = response.status();
        let may_ask_to_wait = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        let retry_after = response.headers().get(RETRY_AFTER).filter(|_| may_ask_to_wait);
        let retry_after = retry_after.and_then(|value| retry_after::parse(value.to_str().ok()?, SystemTime::now()));
        Self { status, retry_after }
    }

    pub(crate) fn is_delivery(&self) -> bool {
        self.status.is_success()
    }

    /// A gateway whose server did not respond in time is as slow as an endpoint that does not.
    pub(crate) fn kind(&self) -> ResponseKind {
        match self.status {
            StatusCode::GATEWAY_TIMEOUT => ResponseKind::TimedOut,
            _ => ResponseKind::Responded,
        }
    }

    /// The outcome of the delivery; `body` is the start of the response body, as far as it arrived.
    pub(crate) fn outcome(self, body: &[u8], request: &Request) -> Outcome {
        if self.is_delivery() {
            return Outcome::Delivered;
        }
        let class = match self.status {
            StatusCode::GONE => FailureClass::Permanent,
            _ => FailureClass::Transient,
        };
        let mut failure = Failure::new(class, self.status.as_str().to_owned(), self.message());
        failure.cause = cause(body, &Secrets::of(request));
        failure.retry_after = self.retry_after;
        Outcome::Failed(failure)
    }

    fn message(&self) -> String {
        let code = self.status.as_str();
        let name = self.status.canonical_reason().map(|name| format!(" {name}")).unwrap_or_default();
        let note = if self.status.is_redirection() { ": redirects are not followed" } else { "" };
        format!("HTTP {code}{name}{note}")
    }
}

/// The start of a body as readable text; `None` if nothing is readable.
fn cause(body: &[u8], secrets: &Secrets) -> Option<String> {
    let text = String::from_utf8_lossy(body);
    // Line breaks become spaces; other control characters are removed.
    let visible: String = text
        .chars()
        .map(|character| if matches!(character, '\n' | '\r' | '\t') { ' ' } else { character })
        .filter(|character| !character.is_control())
        .collect();
    let cause = secrets.hide_in(visible.trim(), MAX_CAUSE);
    (!cause.is_empty()).then_some(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_short_visible_text() {
        let cause = |body: &[u8]| cause(body, &Secrets::default());
        assert_eq!(cause(b""), None);
        assert_eq!(cause(b" \r\n\0\x1b"), None);
        assert_eq!(cause(b"no\x1b[31m such\nuser\x7f"), Some("no[31m such user".into()));
        assert_eq!(cause(b"\xff\xfe"), Some("\u{fffd}\u{fffd}".into()));
        assert_eq!(cause("é".repeat(600).as_bytes()).unwrap(), "é".repeat(512));
        assert!(cause(format!("x{}", "é".repeat(600)).as_bytes()).unwrap().len() <= MAX_CAUSE);
    }

    #[test]
    fn messages_name_the_status() {
        let message = |code: u16| Answer { status: StatusCode::from_u16(code).unwrap(), retry_after: None }.message();
        assert_eq!(message(503), "HTTP 503 Service Unavailable");
        assert_eq!(message(599), "HTTP 599");
        assert_eq!(message(302), "HTTP 302 Found: redirects are not followed");
    }
}

use hyper::header::{HeaderName, HeaderValue};

/// The most headers that a subscription may add.
pub const MAX_CUSTOM_HEADERS: usize = 32;

/// The largest sum of names and values, in bytes: common servers refuse request heads of more than 8 KiB.
const MAX_CUSTOM_HEADERS_SIZE: usize = 6 * 1_024;

/// Headers that frame and route a message. A subscription that sets them could smuggle a second request.
const FRAMING: [&str; 13] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
];

/// Headers that the request has fields for.
const FIELDS: [&str; 2] = ["authorization", "content-type"];

/// Headers that only Posthaste may set, because subscribers rely on their values.
const OURS: [&str; 2] = ["traceparent", "user-agent"];
const OUR_PREFIXES: [&str; 2] = ["posthaste-", "webhook-"];

/// Why a header cannot be part of a request. Values are never repeated: they may be secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// A name that is not an HTTP token.
    #[error("{0:?} is not a header name: use letters, digits and - only")]
    BadName(String),
    /// A value with a line break or another control character or, in a subscription, text outside ASCII.
    #[error("the value of header {0:?} contains a control character or a character outside ASCII")]
    BadValue(String),
    /// A name that HTTP or Posthaste itself sets.
    #[error("header {0:?} cannot be set here: {1}")]
    Reserved(String, &'static str),
    /// More than [`MAX_CUSTOM_HEADERS`].
    #[error("there are {0} headers, more than {MAX_CUSTOM_HEADERS}")]
    TooMany(usize),
    /// Too large for the servers of most subscribers.
    #[error("the headers have {0} bytes, more than {MAX_CUSTOM_HEADERS_SIZE}")]
    TooLarge(usize),
}

/// Checks the headers that a subscription adds to its requests, when it is saved.
pub fn check_custom_headers<N, V>(headers: impl IntoIterator<Item = (N, V)>) -> Result<(), HeaderError>
where
    N: AsRef<str>,
    V: AsRef<str>,
{
    let (mut count, mut size) = (0, 0);
    for (name, value) in headers {
        let (name, _) = parse(name.as_ref(), value.as_ref())?;
        if is_ours(name.as_str()) {
            return Err(HeaderError::Reserved(name.to_string(), "Posthaste sets it"));
        }
        if !value.as_ref().is_ascii() {
            return Err(HeaderError::BadValue(name.to_string()));
        }
        count += 1;
        size += name.as_str().len() + value.as_ref().len();
    }
    if count > MAX_CUSTOM_HEADERS {
        return Err(HeaderError::TooMany(count));
    }
    if size > MAX_CUSTOM_HEADERS_SIZE {
        return Err(HeaderError::TooLarge(size));
    }
    Ok(())
}

/// One header of a request, Posthaste's own included.
pub(crate) fn parse(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), HeaderError> {
    let shown = || name.chars().take(64).collect::<String>();
    let parsed = HeaderName::try_from(name).map_err(|_| HeaderError::BadName(shown()))?;
    if FRAMING.contains(&parsed.as_str()) {
        return Err(HeaderError::Reserved(shown(), "it belongs to the HTTP connection"));
    }
    if FIELDS.contains(&parsed.as_str()) {
        return Err(HeaderError::Reserved(shown(), "it follows from the event and from auth"));
    }
    // Allows UTF-8, which most servers can read: a header of an event must not make its delivery impossible.
    let value = HeaderValue::from_str(value).map_err(|_| HeaderError::BadValue(shown()))?;
    Ok((parsed, value))
}

/// True if Posthaste writes this header, so that its value is no secret.
pub(crate) fn is_ours(name: &str) -> bool {
    let starts_with = |start: &&str| name.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start));
    OURS.iter().any(|ours| name.eq_ignore_ascii_case(ours)) || OUR_PREFIXES.iter().any(starts_with)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, value: &str) -> Result<(), HeaderError> {
        check_custom_headers([(name, value)])
    }

    #[test]
    fn ordinary_headers_are_accepted() {
        assert_eq!(check("X-Api-Key", "abc 123"), Ok(()));
        assert_eq!(check("accept", "*/*"), Ok(()));
        assert_eq!(check("webhooks", ""), Ok(()));
        assert_eq!(check_custom_headers::<&str, &str>([]), Ok(()));
    }

    #[test]
    fn headers_that_http_and_posthaste_set_are_reserved() {
        for name in FRAMING.into_iter().chain(FIELDS).chain(OURS) {
            assert!(matches!(check(name, "x"), Err(HeaderError::Reserved(..))), "{name}");
            assert!(matches!(check(&name.to_uppercase(), "x"), Err(HeaderError::Reserved(..))), "{name}");
        }
        for name in ["webhook-id", "Webhook-Signature", "POSTHASTE-attempt", "posthaste-header-x"] {
            assert!(matches!(check(name, "x"), Err(HeaderError::Reserved(..))), "{name}");
            assert!(is_ours(name));
        }
        assert!(!is_ours("x-api-key") && !is_ours("é"));
    }

    #[test]
    fn names_and_values_must_be_writable() {
        assert_eq!(check("", "x"), Err(HeaderError::BadName(String::new())));
        assert_eq!(check("a b", "x"), Err(HeaderError::BadName("a b".into())));
        assert_eq!(check("a\r\nhost", "x"), Err(HeaderError::BadName("a\r\nhost".into())));
        assert_eq!(check("a", "x\r\nhost: y"), Err(HeaderError::BadValue("a".into())));
        assert_eq!(check("a", "grün"), Err(HeaderError::BadValue("a".into())));
    }

    #[test]
    fn number_and_size_are_limited() {
        let many = (0..=MAX_CUSTOM_HEADERS).map(|index| (format!("x-{index}"), ""));
        assert_eq!(check_custom_headers(many), Err(HeaderError::TooMany(MAX_CUSTOM_HEADERS + 1)));
        let large = "v".repeat(MAX_CUSTOM_HEADERS_SIZE);
        assert_eq!(check("x", &large), Err(HeaderError::TooLarge(MAX_CUSTOM_HEADERS_SIZE + 1)));
    }
}

use std::fmt;
use std::net::IpAddr;

use hyper::Uri;
use url::Url;

/// The longest address of an endpoint, in characters.
pub const MAX_ENDPOINT: usize = 2_048;

/// The address of a subscriber: an absolute `http` or `https` URL. Cheap to clone.
///
/// Query strings often carry tokens, so the text forms show the names in it but not the values.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    uri: Uri,
}

/// Why a text is not the address of an endpoint. No message repeats the address, which may contain secrets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// More than [`MAX_ENDPOINT`] characters.
    #[error("the address has {0} characters, more than {MAX_ENDPOINT}")]
    TooLong(usize),
    /// Characters that URL parsers silently drop: the called address would differ from the written one.
    #[error("the address contains a space or a control character: write it percent-encoded, such as %20")]
    Whitespace,
    /// No `scheme://` in front.
    #[error("the address is not absolute: start it with https:// or http://")]
    NotAbsolute,
    /// A scheme that is not HTTP.
    #[error("the scheme {0:?} is not supported: use https or http")]
    Scheme(String),
    /// Nothing between the scheme and the path.
    #[error("the address names no host")]
    NoHost,
    /// Credentials in front of the host.
    #[error("the address contains credentials (user:password@): give them in auth, where they are kept sealed")]
    UserInfo,
    /// A fragment, which is never sent.
    #[error("the address contains a fragment (#…), which HTTP never sends: remove it")]
    Fragment,
    /// Anything else that is wrong with it.
    #[error("the address is not a valid URL: {0}")]
    Invalid(#[source] url::ParseError),
    /// A URL that cannot be written in an HTTP request.
    #[error("the address contains characters that HTTP does not allow: write them percent-encoded")]
    Unwritable,
}

impl Endpoint {
    /// Reads an address as a subscriber writes it; international host names become ASCII.
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        let length = text.chars().count();
        if length > MAX_ENDPOINT {
            return Err(EndpointError::TooLong(length));
        }
        if text.chars().any(|character| character.is_whitespace() || character.is_control()) {
            return Err(EndpointError::Whitespace);
        }
        // The URL standard is lenient: "https:host", "https:////host" and "https:\\host" all name a host. The called
        // host must be the one that a reader of the address expects, so only the plain form is accepted.
        let (scheme, rest) = text.split_once("://").ok_or(EndpointError::NotAbsolute)?;
        if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
            return Err(EndpointError::Scheme(scheme.chars().take(32).collect()));
        }
        let authority = rest.split(['/', '\\', '?', '#']).next().unwrap_or_default();
        if authority.is_empty() || authority.starts_with(':') {
            return Err(EndpointError::NoHost);
        }
        if authority.contains('@') {
            return Err(EndpointError::UserInfo);
        }
        if text.contains('#') {
            return Err(EndpointError::Fragment);
        }
        let url = Url::parse(text).map_err(EndpointError::Invalid)?;
        let uri = Uri::try_from(String::from(url)).map_err(|_| EndpointError::Unwritable)?;
        Ok(Self { uri })
    }

    /// The whole address, secrets in its query string included: for sending and for storing, not for showing.
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// The host and, if it is not the default of the scheme, the port. Messages name the endpoint with it.
    pub fn authority(&self) -> &str {
        self.uri.authority().map_or("", |authority| authority.as_str())
    }

    /// The host name or address, IPv6 in brackets.
    pub fn host(&self) -> &str {
        self.uri.host().unwrap_or_default()
    }

    /// The IP address, if the endpoint has one in place of a name. Parsing has made one form of all the ways in which an
    /// address can be written, such as `127.1`, `0x7f000001` or `2130706433`.
    pub fn address(&self) -> Option<IpAddr> {
        address_in(&self.uri)
    }

    /// True if requests are encrypted.
    pub fn is_https(&self) -> bool {
        self.uri.scheme_str() == Some("https")
    }
}

/// The IP address that stands in a URI. The connector of hyper reads it in the same way.
pub(crate) fn address_in(uri: &Uri) -> Option<IpAddr> {
    let host = uri.host()?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    bare.unwrap_or(host).parse().ok()
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        write!(f, "{scheme}://{}{}", self.authority(), self.uri.path())?;
        let Some(query) = self.uri.query() else { return Ok(()) };
        for (index, pair) in query.split('&').enumerate() {
            f.write_str(if index == 0 { "?" } else { "&" })?;
            match pair.split_once('=') {
                Some((name, _)) => write!(f, "{name}=***")?,
                // A pair without a name is all value.
                None => f.write_str("***")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({self})")
    }
}

impl std::str::FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn plain_addresses_are_accepted() {
        for text in [
            "http://localhost:9000/hook",
            "https://example.com/",
            "HTTPS://Example.com/a/b?x=1&y=2",
            "http://[::1]:8080/hook",
            "http://127.0.0.1/a%20b",
            "https://bücher.example/hook",
            "http://example.com?topic=a@b",
        ] {
            assert!(Endpoint::parse(text).is_ok(), "{text}: {:?}", Endpoint::parse(text));
        }
        let endpoint = Endpoint::parse("https://bücher.example:8443/hook").unwrap();
        assert_eq!(endpoint.authority(), "xn--bcher-kva.example:8443");
        assert_eq!(endpoint.host(), "xn--bcher-kva.example");
        assert!(endpoint.is_https());
    }

    #[test]
    fn each_kind_of_bad_address_has_its_own_error() {
        let refused = |text: &str| Endpoint::parse(text).unwrap_err();
        assert_eq!(refused(""), EndpointError::NotAbsolute);
        assert_eq!(refused("localhost:9000/hook"), EndpointError::NotAbsolute);
        assert_eq!(refused("https:example.com"), EndpointError::NotAbsolute);
        assert_eq!(refused("ftp://example.com/"), EndpointError::Scheme("ftp".into()));
        assert_eq!(refused("file:///etc/passwd"), EndpointError::Scheme("file".into()));
        assert_eq!(refused("http:///hook"), EndpointError::NoHost);
        assert_eq!(refused("http://:80/hook"), EndpointError::NoHost);
        assert_eq!(refused("http://user:secret@example.com/"), EndpointError::UserInfo);
        assert_eq!(refused("http://@example.com/"), EndpointError::UserInfo);
        assert_eq!(refused("http://example.com/#top"), EndpointError::Fragment);
        assert_eq!(refused("http://example.com/a b"), EndpointError::Whitespace);
        assert_eq!(refused("http://example.com/\n"), EndpointError::Whitespace);
        assert!(matches!(refused("http://example.com:99999/"), EndpointError::Invalid(_)));
        let long = format!("http://h/{}", "x".repeat(MAX_ENDPOINT - 9));
        assert!(Endpoint::parse(&long).is_ok());
        assert_eq!(refused(&(long + "x")), EndpointError::TooLong(MAX_ENDPOINT + 1));
    }

    #[test]
    fn text_forms_hide_the_values_of_the_query() {
        let endpoint = Endpoint::parse("https://example.com/hook?token=s3cret&plain&a=b=c").unwrap();
        assert_eq!(endpoint.to_string(), "https://example.com/hook?token=***&***&a=***");
        assert_eq!(format!("{endpoint:?}"), "Endpoint(https://example.com/hook?token=***&***&a=***)");
        assert_eq!(endpoint.uri().query(), Some("token=s3cret&plain&a=b=c"));
    }

    #[test]
    fn refusals_do_not_repeat_credentials() {
        let refusal = Endpoint::parse("http://user:s3cret@example.com/").unwrap_err().to_string();
        assert!(!refusal.contains("s3cret") && refusal.contains("auth"), "{refusal}");
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "(https?://)?\\PC{0,60}") {
            if let Ok(endpoint) = Endpoint::parse(&text) {
                prop_assert!(!endpoint.host().is_empty());
            }
        }
    }
}

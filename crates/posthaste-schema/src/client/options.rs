use std::fmt;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::HeaderValue;
use rustls::pki_types::CertificateDer;
use url::Url;

/// How a [`RegistryClient`](crate::RegistryClient) reaches its registry.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    pub(super) bases: Vec<Base>,
    /// How long a connection may take to open.
    pub connect_timeout: Duration,
    /// How long one request may take, until the last byte of its answer.
    pub request_timeout: Duration,
    /// How often a request is sent to each URL before it fails.
    pub attempts: u32,
    /// The pause before the second attempt. Each further pause is twice as long.
    pub first_pause: Duration,
    /// How long an answer that there is no such schema, or a failed look-up, is believed. Records that need that schema
    /// do not cause requests meanwhile.
    pub failure_memory: Duration,
    /// How long an id without a schema counts as an outage: the replicas of a registry do not all know a new schema at
    /// the same moment.
    pub replica_lag: Duration,
    /// Certificate authorities to trust beside those of the operating system.
    pub extra_roots: Vec<CertificateDer<'static>>,
}

/// How the client proves who it is.
#[derive(Clone)]
pub enum Credentials {
    /// HTTP Basic.
    Basic {
        /// The user.
        username: String,
        /// The password.
        password: String,
    },
    /// A bearer token.
    Bearer {
        /// The token.
        token: String,
    },
}

/// One URL of a registry.
#[derive(Clone)]
pub(super) struct Base {
    /// Without user and password.
    pub(super) url: Url,
    pub(super) authorization: Option<HeaderValue>,
}

/// Why a client cannot be configured so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// There is no URL.
    #[error("no URL of a schema registry is given: write http://HOST:PORT, or several separated by commas")]
    NoUrl,
    /// A URL cannot be used.
    #[error("URL number {number} of the schema registry cannot be used: {problem}; write http(s)://HOST:PORT/PATH")]
    BadUrl {
        /// Its number, from 1. The URL itself may contain a password.
        number: usize,
        /// What is wrong.
        problem: String,
    },
    /// User, password or token cannot be sent in a header.
    #[error("user, password or token of the schema registry contain characters that a header cannot have")]
    BadCredentials,
}

impl ClientOptions {
    /// The defaults, for one URL or several separated by commas. A URL may contain user and password.
    pub fn new(urls: &str) -> Result<Self, OptionsError> {
        let urls = urls.split(',').map(str::trim).filter(|url| !url.is_empty());
        let bases: Vec<Base> =
            urls.enumerate().map(|(index, url)| Base::new(index + 1, url)).collect::<Result<_, _>>()?;
        if bases.is_empty() {
            return Err(OptionsError::NoUrl);
        }
        Ok(Self {
            bases,
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(5),
            attempts: 3,
            first_pause: Duration::from_millis(100),
            failure_memory: Duration::from_secs(1),
            replica_lag: Duration::from_secs(10),
            extra_roots: Vec::new(),
        })
    }

    /// Sends these credentials to every URL that has none of its own.
    pub fn credentials(mut self, credentials: &Credentials) -> Result<Self, OptionsError> {
        let authorization = authorization(credentials)?;
        for base in &mut self.bases {
            base.authorization.get_or_insert_with(|| authorization.clone());
        }
        Ok(self)
    }
}

impl Base {
    fn new(number: usize, text: &str) -> Result<Self, OptionsError> {
        let bad = |problem: &str| OptionsError::BadUrl { number, problem: problem.to_owned() };
        let mut url = Url::parse(text).map_err(|error| bad(&error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(bad("it must begin with http:// or https://"));
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(bad("it has a query or a fragment"));
        }
        let password = url.password().map(percent_decoded);
        let authorization = match (percent_decoded(url.username()), password) {
            (username, None) if username.is_empty() => None,
            (username, password) => {
                let password = password.unwrap_or_default();
                Some(authorization(&Credentials::Basic { username, password })?)
            }
        };
        // Fails only for URLs without a host, and these two schemes need one.
        let removed = url.set_username("").and_then(|()| url.set_password(None));
        removed.map_err(|()| bad("it has no host"))?;
        Ok(Self { url, authorization })
    }

    /// The address, for people.
    pub(super) fn shown(&self) -> &str {
        self.url.as_str().trim_end_matches('/')
    }
}

fn authorization(credentials: &Credentials) -> Result<HeaderValue, OptionsError> {
    let text = match credentials {
        Credentials::Basic { username, password } => {
            format!("Basic {}", STANDARD.encode(format!("{username}:{password}")))
        }
        Credentials::Bearer { token } => format!("Bearer {token}"),
    };
    let mut value = HeaderValue::try_from(text).map_err(|_| OptionsError::BadCredentials)?;
    value.set_sensitive(true);
    Ok(value)
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let code = after.get(..2).filter(|_| *byte == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(code) => {
                bytes.push(code);
                rest = &after[2..];
            }
            None => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl fmt::Debug for Credentials {
    /// Shows no secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic { username, .. } => f.debug_struct("Basic").field("username", username).finish_non_exhaustive(),
            Self::Bearer { .. } => f.debug_struct("Bearer").finish_non_exhaustive(),
        }
    }
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_taken_out_of_the_url_and_never_shown() {
        let options = ClientOptions::new("http://me:p%40ss@one:8081/api/, https://two").unwrap();
        let basic = format!("Basic {}", STANDARD.encode("me:p@ss"));
        assert_eq!(options.bases[0].authorization.as_ref().unwrap().to_str().unwrap(), basic);
        assert!(options.bases[1].authorization.is_none());
        assert_eq!(options.bases[0].shown(), "http://one:8081/api");
        let options = options.credentials(&Credentials::Bearer { token: "t0ken".to_owned() }).unwrap();
        assert_eq!(options.bases[0].authorization.as_ref().unwrap().to_str().unwrap(), basic, "its own come first");
        assert_eq!(options.bases[1].authorization.as_ref().unwrap().to_str().unwrap(), "Bearer t0ken");
        let shown = format!("{options:?} {:?}", Credentials::Bearer { token: "t0ken".to_owned() });
        assert!(!shown.contains("t0ken") && !shown.contains("p@ss") && !shown.contains("p%40ss"), "{shown}");
    }

    #[test]
    fn bad_urls_are_named_without_their_password() {
        assert_eq!(ClientOptions::new(" , ").unwrap_err(), OptionsError::NoUrl);
        for bad in ["one:8081", "ftp://me:secret@one", "http://", "http://one?a=b", "http://me:secret@"] {
            let error = ClientOptions::new(&format!("http://fine,{bad}")).unwrap_err();
            assert!(matches!(&error, OptionsError::BadUrl { number: 2, .. }), "{error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let token = Credentials::Bearer { token: "a\nb".to_owned() };
        let error = ClientOptions::new("http://one").unwrap().credentials(&token).unwrap_err();
        assert_eq!(error, OptionsError::BadCredentials);
    }
}

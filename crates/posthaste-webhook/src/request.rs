use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, USER_AGENT};

use crate::auth::{Auth, AuthError};
use crate::endpoint::Endpoint;
use crate::header::{self, HeaderError};

/// One POST. Debug output shows neither the body nor header values.
#[derive(Clone)]
pub struct Request {
    /// The address to call.
    pub endpoint: Endpoint,
    /// Sent byte for byte.
    pub body: Bytes,
    /// The content type of the body.
    pub content_type: Cow<'static, str>,
    /// Sent beside `Content-Type`, `Authorization` and `User-Agent`, in this order.
    pub headers: Vec<(String, String)>,
    /// The credentials.
    pub auth: Auth,
    /// How long everything may take: resolving, connecting, sending, and reading the response to its end.
    pub timeout: Duration,
}

/// Why a request cannot be built. A retry would not change that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A header cannot be sent.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The credentials cannot be sent.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// The content type cannot be sent.
    #[error("the content type contains a control character")]
    ContentType,
}

impl Request {
    pub(crate) fn to_http(&self, user_agent: &HeaderValue) -> Result<hyper::Request<Full<Bytes>>, RequestError> {
        let mut request = hyper::Request::new(Full::new(self.body.clone()));
        *request.method_mut() = hyper::Method::POST;
        *request.uri_mut() = self.endpoint.uri().clone();
        let headers = request.headers_mut();
        // Five more than the given: those inserted here and the host that hyper adds.
        headers.reserve(self.headers.len() + 5);
        // By default, hyper writes none for an empty body, and some servers refuse that with 411.
        headers.insert(CONTENT_LENGTH, HeaderValue::from(self.body.len()));
        headers.insert(USER_AGENT, user_agent.clone());
        let content_type = HeaderValue::from_str(&self.content_type);
        headers.insert(CONTENT_TYPE, content_type.map_err(|_| RequestError::ContentType)?);
        if let Some(value) = self.auth.header_value()? {
            headers.insert(AUTHORIZATION, value);
        }
        for (name, value) in &self.headers {
            let (name, value) = header::parse(name, value)?;
            headers.append(name, value);
        }
        Ok(request)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.headers.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("Request")
            .field("endpoint", &self.endpoint)
            .field("body_length", &self.body.len())
            .field("content_type", &self.content_type)
            .field("header_names", &names)
            .field("auth", &self.auth)
            .field("timeout", &self.timeout)
            .finish()
    }
}

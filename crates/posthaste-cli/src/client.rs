use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{ACCEPT, CONTENT_TYPE, ETAG, HeaderValue, IF_MATCH};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use posthaste_api::{
    BatchOut, ChannelList, ChannelOut, DeadLetterDetail, DeadLetterPage, Definition, DefinitionIn, EventIn, Problem,
    PublishOut, QuarantineDiscardIn, QuarantinePage, QuarantineReplayIn, QuarantineResults, QuarantinedDetail,
    ReplayIn, ReplayOut, ResetIn, ResetOut, SourceList, Subscription, SubscriptionIn, TopicList, TopicRecords,
};
use posthaste_hub::Created;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use url::Url;
use uuid::Uuid;

use crate::exit::Exit;

/// How long the client waits for a response, in addition to the `wait` of the request.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the client waits for the replay of quarantined records, whose bytes are published before the response.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(300);
/// The largest response to read. The server never sends as much; another program at this address might.
const MAX_RESPONSE: usize = 64 << 20;

/// Calls the REST API of a server.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    server: Url,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{server:?} is not the address of a server: write http://HOST:PORT")]
    BadServer { server: String },
    #[error("cannot reach the server at {server}: is `posthaste serve` running?")]
    Unreachable {
        server: String,
        #[source]
        source: legacy::Error,
    },
    #[error("the server at {server} closed the connection before its response was complete")]
    ConnectionClosed {
        server: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the server at {server} did not respond within {} s", .timeout.as_secs())]
    TimedOut { server: String, timeout: Duration },
    #[error("{}", describe(.0))]
    Refused(Box<Problem>),
    #[error(
        "the response of {server} (status {status}) does not come from Posthaste: is it another program's address?"
    )]
    Foreign { server: String, status: StatusCode },
    #[error("the request cannot be written")]
    Unwritable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// One page of a list.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Page<T> {
    pub items: Vec<T>,
    pub page: u32,
    pub size: u32,
    pub total: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// A resource that was read in order to change it. The server refuses the change if the resource changed meanwhile.
pub struct Versioned<T> {
    pub value: T,
    tag: Option<HeaderValue>,
}

/// Names and values of a query string; names with the value `None` are left out.
pub type Query<'a> = [(&'a str, Option<String>)];

impl ClientError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::BadServer { .. } => Exit::Usage,
            Self::Unreachable { .. } | Self::ConnectionClosed { .. } | Self::TimedOut { .. } => Exit::Unreachable,
            Self::Refused(problem) => match problem.status {
                404 => Exit::NotFound,
                503 => Exit::Unreachable,
                _ => Exit::Failed,
            },
            Self::Foreign { .. } | Self::Unwritable(_) => Exit::Failed,
        }
    }

    /// True if the server refused the request because it conflicts with stored data.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused(problem) if problem.status == 409)
    }
}

impl Client {
    pub fn new(server: &str) -> Result<Self, ClientError> {
        let bad = || ClientError::BadServer { server: server.to_owned() };
        let url = Url::parse(server).ok().filter(|url| url.scheme() == "http" && url.has_host()).ok_or_else(bad)?;
        Ok(Self { http: legacy::Client::builder(TokioExecutor::new()).build_http(), server: url })
    }

    pub async fn publish(&self, event: &EventIn) -> Result<PublishOut, ClientError> {
        self.send(Method::POST, "api/events", &[], json(event)?).await
    }

    /// `events` is the text of a JSON array, which is sent unchanged.
    pub async fn publish_batch(&self, events: Bytes) -> Result<BatchOut, ClientError> {
        self.send(Method::POST, "api/events/batch", &[], Some(events)).await
    }

    pub async fn definitions(&self, query: &Query<'_>) -> Result<Page<Definition>, ClientError> {
        self.send(Method::GET, "api/event-definitions", query, None).await
    }

    pub async fn definition(&self, id: Uuid) -> Result<Versioned<Definition>, ClientError> {
        self.versioned(&format!("api/event-definitions/{id}")).await
    }

    pub async fn create_definition(&self, definition: &DefinitionIn) -> Result<Definition, ClientError> {
        self.send(Method::POST, "api/event-definitions", &[], json(definition)?).await
    }

    pub async fn update_definition(
        &self,
        before: &Versioned<Definition>,
        definition: &DefinitionIn,
    ) -> Result<Definition, ClientError> {
        let path = format!("api/event-definitions/{}", before.value.id);
        self.replace(&path, before.tag.as_ref(), json(definition)?).await
    }

    pub async fn delete_definition(&self, id: Uuid) -> Result<(), ClientError> {
        self.delete(&format!("api/event-definitions/{id}")).await
    }

    pub async fn subscriptions(&self, query: &Query<'_>) -> Result<Page<Subscription>, ClientError> {
        self.send(Method::GET, "api/subscriptions", query, None).await
    }

    pub async fn subscription(&self, id: Uuid) -> Result<Versioned<Subscription>, ClientError> {
        self.versioned(&format!("api/subscriptions/{id}")).await
    }

    /// If the same subscription exists already, the server returns that one and creates none.
    pub async fn create_subscription(
        &self,
        subscription: &SubscriptionIn,
    ) -> Result<Created<Subscription>, ClientError> {
        let request = self.request(Method::POST, "api/subscriptions", &[], None, json(subscription)?)?;
        let response = self.exchange(request, RESPONSE_TIMEOUT).await?;
        match response.status() {
            StatusCode::CREATED => self.read(response).map(Created::New),
            _ => self.read(response).map(Created::Existing),
        }
    }

    pub async fn update_subscription(
        &self,
        before: &Versioned<Subscription>,
        subscription: &SubscriptionIn,
    ) -> Result<Subscription, ClientError> {
        let path = format!("api/subscriptions/{}", before.value.id);
        self.replace(&path, before.tag.as_ref(), json(subscription)?).await
    }

    pub async fn delete_subscription(&self, id: Uuid) -> Result<(), ClientError> {
        self.delete(&format!("api/subscriptions/{id}")).await
    }

    pub async fn dead_letters(&self, query: &Query<'_>) -> Result<DeadLetterPage, ClientError> {
        self.send(Method::GET, "api/dlt-messages", query, None).await
    }

    pub async fn dead_letter(&self, id: Uuid) -> Result<DeadLetterDetail, ClientError> {
        self.send(Method::GET, &format!("api/dlt-messages/{id}"), &[], None).await
    }

    /// With `wait`, waits that long and returns the results of the dead letters that are known by then.
    pub async fn replay(&self, replay: &ReplayIn, wait: Option<Duration>) -> Result<ReplayOut, ClientError> {
        let query = [("wait", wait.map(|wait| wait.as_secs().to_string()))];
        let timeout = RESPONSE_TIMEOUT + wait.unwrap_or_default();
        let request = self.request(Method::POST, "api/replay", &query, None, json(replay)?)?;
        self.read(self.exchange(request, timeout).await?)
    }

    pub async fn channels(&self) -> Result<ChannelList, ClientError> {
        self.send(Method::GET, "api/channels", &[], None).await
    }

    pub async fn pause_channel(&self, event_type: &str, is_paused: bool) -> Result<ChannelOut, ClientError> {
        let action = if is_paused { "pause" } else { "resume" };
        self.send(Method::POST, &format!("api/channels/{}/{action}", segment(event_type)), &[], None).await
    }

    pub async fn sources(&self) -> Result<SourceList, ClientError> {
        self.send(Method::GET, "api/sources", &[], None).await
    }

    pub async fn topics(&self) -> Result<TopicList, ClientError> {
        self.send(Method::GET, "api/topics", &[], None).await
    }

    pub async fn reset_position(&self, reset: &ResetIn) -> Result<ResetOut, ClientError> {
        self.send(Method::POST, "api/topics/reset", &[], json(reset)?).await
    }

    /// `from` is `earliest`, `latest` or the cursor of the page before.
    pub async fn topic_records(&self, topic: &str, from: &str, limit: u64) -> Result<TopicRecords, ClientError> {
        let query = [("from", Some(from.to_owned())), ("limit", Some(limit.to_string()))];
        self.send(Method::GET, &format!("api/topics/{}/records", segment(topic)), &query, None).await
    }

    pub async fn quarantine(&self, query: &Query<'_>) -> Result<QuarantinePage, ClientError> {
        self.send(Method::GET, "api/quarantine", query, None).await
    }

    pub async fn quarantined(&self, id: Uuid) -> Result<QuarantinedDetail, ClientError> {
        self.send(Method::GET, &format!("api/quarantine/{id}"), &[], None).await
    }

    pub async fn replay_quarantined(&self, replay: &QuarantineReplayIn) -> Result<QuarantineResults, ClientError> {
        let request = self.request(Method::POST, "api/quarantine/replay", &[], None, json(replay)?)?;
        self.read(self.exchange(request, REPLAY_TIMEOUT).await?)
    }

    pub async fn discard_quarantined(&self, discard: &QuarantineDiscardIn) -> Result<QuarantineResults, ClientError> {
        self.send(Method::POST, "api/quarantine/discard", &[], json(discard)?).await
    }

    async fn versioned<T: DeserializeOwned>(&self, path: &str) -> Result<Versioned<T>, ClientError> {
        let response = self.exchange(self.request(Method::GET, path, &[], None, None)?, RESPONSE_TIMEOUT).await?;
        let tag = response.headers().get(ETAG).cloned();
        Ok(Versioned { value: self.read(response)?, tag })
    }

    async fn replace<T: DeserializeOwned>(
        &self,
        path: &str,
        tag: Option<&HeaderValue>,
        body: Option<Bytes>,
    ) -> Result<T, ClientError> {
        self.read(self.exchange(self.request(Method::PUT, path, &[], tag, body)?, RESPONSE_TIMEOUT).await?)
    }

    async fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.exchange(self.request(Method::DELETE, path, &[], None, None)?, RESPONSE_TIMEOUT).await.map(drop)
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &Query<'_>,
        body: Option<Bytes>,
    ) -> Result<T, ClientError> {
        self.read(self.exchange(self.request(method, path, query, None, body)?, RESPONSE_TIMEOUT).await?)
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        query: &Query<'_>,
        tag: Option<&HeaderValue>,
        body: Option<Bytes>,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut url = self.server.clone();
        url.set_path(&format!("{}/{path}", self.server.path().trim_end_matches('/')));
        url.set_query(None);
        for (name, value) in query {
            if let Some(value) = value {
                url.query_pairs_mut().append_pair(name, value);
            }
        }
        let mut request = Request::builder().method(method).uri(url.as_str()).header(ACCEPT, "application/json");
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(tag) = tag {
            request = request.header(IF_MATCH, tag);
        }
        let body = Full::new(body.unwrap_or_default());
        request.body(body).map_err(|error| ClientError::Unwritable(error.into()))
    }

    /// Sends the request and returns the response if its status is a success.
    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        timeout: Duration,
    ) -> Result<hyper::Response<Bytes>, ClientError> {
        let server = || self.server.as_str().trim_end_matches('/').to_owned();
        let exchange = async {
            let response = self.http.request(request).await.map_err(|source| match source.is_connect() {
                true => ClientError::Unreachable { server: server(), source },
                false => ClientError::ConnectionClosed { server: server(), source: source.into() },
            })?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_RESPONSE).collect().await;
            let body = body.map_err(|source| ClientError::ConnectionClosed { server: server(), source })?;
            Ok(hyper::Response::from_parts(head, body.to_bytes()))
        };
        let response = tokio::time::timeout(timeout, exchange).await;
        let response = response.map_err(|_| ClientError::TimedOut { server: server(), timeout })??;
        if response.status().is_success() {
            return Ok(response);
        }
        Err(match serde_json::from_slice(response.body()) {
            Ok(problem) => ClientError::Refused(problem),
            Err(_) => ClientError::Foreign { server: server(), status: response.status() },
        })
    }

    fn read<T: DeserializeOwned>(&self, response: hyper::Response<Bytes>) -> Result<T, ClientError> {
        let status = response.status();
        let foreign = |_| ClientError::Foreign { server: self.server.to_string(), status };
        serde_json::from_slice(response.body()).map_err(foreign)
    }
}

/// A name as one segment of a path. What is not a letter, a digit or one of `.`, `_`, `-` is escaped.
fn segment(name: &str) -> String {
    let escaped = |byte: u8| match byte {
        b'.' | b'_' | b'-' => char::from(byte).to_string(),
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    name.bytes().map(escaped).collect()
}

/// Describes a problem: by its violations if it has any, because its other fields only summarise them.
fn describe(problem: &Problem) -> String {
    match problem.errors.as_slice() {
        [] => problem.to_string(),
        errors => errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    }
}

fn json<T: Serialize>(value: &T) -> Result<Option<Bytes>, ClientError> {
    let text = serde_json::to_vec(value).map_err(|error| ClientError::Unwritable(error.into()))?;
    Ok(Some(text.into()))
}

#[cfg(test)]
mod tests {
    use posthaste_api::FieldError;

    use super::*;

    #[test]
    fn only_http_addresses_are_servers() {
        for server in ["http://127.0.0.1:8080", "http://localhost:1/", "http://h/below"] {
            assert!(Client::new(server).is_ok(), "{server}");
        }
        for server in ["localhost:8080", "https://h", "", "http://"] {
            let error = Client::new(server).err().unwrap();
            assert_eq!(error.exit(), Exit::Usage, "{server}");
        }
    }

    #[test]
    fn queries_are_escaped_and_absent_values_left_out() {
        let client = Client::new("http://h:1/below/").unwrap();
        let query = [("q", Some("a b&c".to_owned())), ("page", None)];
        let request = client.request(Method::GET, "api/x", &query, None, None).unwrap();
        assert_eq!(request.uri().to_string(), "http://h:1/below/api/x?q=a+b%26c");
        let request = client.request(Method::GET, "api/x", &[], None, None).unwrap();
        assert_eq!(request.uri().to_string(), "http://h:1/below/api/x");
    }

    #[test]
    fn a_name_is_one_segment_of_a_path() {
        let client = Client::new("http://h:1").unwrap();
        let path = format!("api/topics/{}/records", segment("posthaste.events.a-b_c/ü?%"));
        let request = client.request(Method::GET, &path, &[], None, None).unwrap();
        assert_eq!(request.uri().path(), "/api/topics/posthaste.events.a-b_c%2F%C3%BC%3F%25/records");
    }

    #[tokio::test]
    async fn an_address_without_a_server_is_unreachable() {
        // Bound but not listening: connections to this port are refused as long as the test runs.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let client = Client::new(&format!("http://{}", socket.local_addr().unwrap())).unwrap();
        let error = client.delete_definition(Uuid::nil()).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Unreachable);
        assert!(error.to_string().ends_with("is `posthaste serve` running?"), "{error}");
    }

    #[test]
    fn violations_are_described_once() {
        let errors = vec![FieldError::new("a", "is bad"), FieldError::new("b", "is worse")];
        let problem = Problem::new(400, "x", "x").detail("a: is bad; b: is worse").errors(errors);
        assert_eq!(ClientError::Refused(Box::new(problem)).to_string(), "a: is bad; b: is worse");
    }

    #[test]
    fn the_status_of_a_problem_decides_the_exit_code() {
        let exit = |status| ClientError::Refused(Box::new(Problem::new(status, "x", "x"))).exit();
        assert_eq!([404, 503, 409, 400].map(exit), [Exit::NotFound, Exit::Unreachable, Exit::Failed, Exit::Failed]);
    }
}

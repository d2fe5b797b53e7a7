use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

/// The REST API as any HTTP client sees it.
#[derive(Clone)]
pub struct Api {
    client: Client<HttpConnector, Full<Bytes>>,
    address: SocketAddr,
}

pub struct Answer {
    pub status: u16,
    pub headers: hyper::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.text))
    }

    /// The error code of a problem document.
    pub fn code(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/problem+json", "{}", self.text);
        let problem = self.json();
        assert_eq!(problem["status"], self.status);
        assert!(problem["title"].is_string() && problem["detail"].is_string(), "{problem}");
        problem["code"].as_str().expect("a code").to_owned()
    }
}

impl Api {
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn new(address: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), address }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer, hyper_util::client::legacy::Error> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        let response = self.client.request(request).await?;
        let (parts, body) = response.into_parts();
        let text = match body.collect().await {
            Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
            Err(_) => String::new(),
        };
        Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, text })
    }

    pub async fn get(&self, path: &str) -> Result<Answer, hyper_util::client::legacy::Error> {
        self.send("GET", path, &[], "").await
    }

    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Result<Answer, hyper_util::client::legacy::Error> {
        self.send("POST", path, &[("content-type", "application/json")], body).await
    }

    /// Creates a definition if it does not exist, and a subscription to it.
    pub async fn subscribe(&self, event_type: &str, subscriber: &str, endpoint: &str) -> Value {
        let definition = json!({ "eventType": event_type });
        let defined = self.post("/api/event-definitions", definition.to_string()).await.expect("an answer");
        assert!(matches!(defined.status, 201 | 409), "{}", defined.text);
        let subscription = json!({
            "subscriberId": subscriber,
            "eventKey": { "eventType": event_type },
            "endpoint": endpoint,
        });
        let created = self.post("/api/subscriptions", subscription.to_string()).await.expect("an answer");
        assert_eq!(created.status, 201, "{}", created.text);
        created.json()
    }

    pub async fn publish(&self, event_type: &str, payload: &str) -> String {
        let body = format!(r#"{{"eventType":"{event_type}","sourceService":"e2e","payload":{payload}}}"#);
        let accepted = self.post("/api/events", body).await.expect("an answer");
        assert_eq!(accepted.status, 202, "{}", accepted.text);
        accepted.json()["eventId"].as_str().expect("an id").to_owned()
    }
}

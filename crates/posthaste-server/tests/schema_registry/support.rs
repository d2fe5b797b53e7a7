use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use metrics_exporter_prometheus::PrometheusBuilder;
use posthaste_backend_tests::servers;
use posthaste_hub::{Hub, Parts, Sealer, Settings};
use posthaste_schema::{ClientOptions, RegistryClient, SchemaText};
use posthaste_server::ClientLimits;
use posthaste_sql::sqlite::HubDatabase;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A registry, and a prefix for subjects that no other test has.
pub struct Registry {
    pub url: String,
    pub prefix: String,
    /// The server of the built-in registry, which stops when it is dropped.
    _server: Option<Server>,
}

struct Server {
    stop: CancellationToken,
    _folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Registry {
    pub async fn apicurio() -> Self {
        let (url, prefix) = servers::apicurio().await;
        Self { url, prefix, _server: None }
    }

    /// A hub with all its tables, and its HTTP server.
    pub async fn builtin() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let database = format!("sqlite://{}", folder.path().join("hub.db").display());
        let parts = Parts {
            bus: None,
            registry: None,
            channel_buses: Default::default(),
            sources: Vec::new(),
            roles: Default::default(),
            database: Arc::new(HubDatabase::open(&database).await.unwrap()),
            client: posthaste_webhook::Client::new(posthaste_webhook::ClientOptions::default()),
            sealer: Sealer::open(&folder.path().join("hub.key")).unwrap(),
            settings: Settings::default(),
        };
        let hub = Hub::start(parts).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/registry", listener.local_addr().unwrap());
        let metrics = PrometheusBuilder::new().build_recorder().handle();
        let timeout = Duration::from_secs(30);
        let limits = ClientLimits { header_timeout: timeout, body_timeout: timeout, max_connections: 100 };
        let stop = CancellationToken::new();
        tokio::spawn(posthaste_server::serve(listener, hub, metrics, limits, stop.clone()));
        Self { url, prefix: String::new(), _server: Some(Server { stop, _folder: folder }) }
    }

    pub fn client(&self) -> RegistryClient {
        let mut options = ClientOptions::new(&self.url).unwrap();
        options.replica_lag = std::time::Duration::ZERO;
        RegistryClient::new(options)
    }

    pub fn subject(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Sends a request and returns the status and the JSON of its answer.
    pub async fn send(&self, method: Method, path: &str, body: Option<Value>) -> (StatusCode, Value) {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let (status, text) = self.send_text(method, path, "application/json", body).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    pub async fn send_text(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: String,
    ) -> (StatusCode, String) {
        let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
        let request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        let request = request.header("content-type", content_type).body(Full::new(Bytes::from(body))).unwrap();
        let response = client.request(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }
}

pub fn text(text: &str) -> SchemaText {
    SchemaText { text: format!("syntax = \"proto3\";\n{text}"), references: Vec::new() }
}

/// The schema of the records on the bus.
pub fn events() -> SchemaText {
    let text = include_str!("../../../posthaste-api/proto/posthaste/v1/events.proto").to_owned();
    SchemaText { text, references: Vec::new() }
}

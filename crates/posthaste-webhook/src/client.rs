use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::StatusCode;
use hyper::header::HeaderValue;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as PooledClient;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use posthaste_core::{Failure, Outcome};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, RootCertStore};
use tracing::warn;

use crate::answer::Answer;
use crate::connection::{self, ExchangeError};
use crate::egress::{EgressGuard, GuardedConnector};
use crate::request::Request;
use crate::response_body;

/// The largest response head. Its number of headers is limited to hyper's own 100.
const MAX_RESPONSE_HEAD: usize = 32 * 1_024;

/// Sends requests over shared, pooled HTTP/1.1 connections. Cheap to clone; clones share the pool.
#[derive(Clone)]
pub struct Client {
    http: PooledClient<HttpsConnector<GuardedConnector>, Full<Bytes>>,
    user_agent: HeaderValue,
    connect_timeout: Duration,
    egress: EgressGuard,
}

/// The options for all requests of a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// How long a TCP connection may take to open; the request's own timeout applies as well.
    pub connect_timeout: Duration,
    /// How long an unused connection is kept. Shorter than the five seconds after which common servers hang up, so
    /// that a request seldom uses a connection that is being closed.
    pub pool_idle_timeout: Duration,
    /// How many unused connections are kept for each host.
    pub pool_max_idle_per_host: usize,
    /// The value of `User-Agent`.
    pub user_agent: HeaderValue,
    /// Certificate authorities to trust beside those of the operating system.
    pub extra_roots: Vec<CertificateDer<'static>>,
    /// Judges every address before a connection to it is made. The default allows only public addresses.
    pub egress: EgressGuard,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(1),
            pool_idle_timeout: Duration::from_secs(4),
            pool_max_idle_per_host: 256,
            user_agent: HeaderValue::from_static(concat!("posthaste/", env!("CARGO_PKG_VERSION"))),
            extra_roots: Vec::new(),
            egress: EgressGuard::default(),
        }
    }
}

/// What a request came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// The outcome of the delivery.
    pub outcome: Outcome,
    /// How the endpoint behaved; `None` if no request could be built, or the egress guard denied the connection.
    pub response: Option<ResponseKind>,
}

/// How an endpoint behaved, whatever it said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseKind {
    /// The head of a response arrived.
    Responded,
    /// The response was not complete in time, or a gateway says so of its server.
    TimedOut,
    /// The connection could not be made, or was closed before a response in HTTP.
    NoConnection,
}

impl Client {
    /// Makes a client. On a system without certificate authorities it logs a warning and can still call `http`
    /// endpoints.
    pub fn new(options: ClientOptions) -> Self {
        let tcp = GuardedConnector::new(options.egress.clone(), options.connect_timeout);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls_config(options.extra_roots))
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = PooledClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(options.pool_idle_timeout)
            .pool_max_idle_per_host(options.pool_max_idle_per_host)
            .http1_max_buf_size(MAX_RESPONSE_HEAD)
            // Repeats a request only when a pooled connection was closed before any of it was written.
            .retry_canceled_requests(true)
            .build(connector);
        let ClientOptions { user_agent, connect_timeout, egress, .. } = options;
        Self { http, user_agent, connect_timeout, egress }
    }

    /// The guard that judges where requests go. Endpoints can be checked with it before they are stored.
    pub fn egress(&self) -> &EgressGuard {
        &self.egress
    }

    /// Sends one request, once, and returns its outcome.
    pub async fn post(&self, request: Request) -> Outcome {
        self.exchange(request).await.outcome
    }

    /// Sends one request, once, and returns its outcome and how the endpoint behaved.
    ///
    /// Only a complete response with a 2xx status is a delivery. With any other status, a body that hangs or breaks
    /// does not change the outcome.
    pub async fn exchange(&self, request: Request) -> Exchange {
        let http_request = match request.to_http(&self.user_agent) {
            Ok(http_request) => http_request,
            Err(error) => {
                let outcome = Outcome::Failed(Failure::permanent("unbuildable", error.to_string()));
                return Exchange { outcome, response: None };
            }
        };
        let mut head = None;
        let exchange = async {
            let response = self.http.request(http_request).await?;
            let answer = *head.insert(Answer::of(&response));
            let kept = if answer.is_delivery() { 0 } else { response_body::MAX_KEPT_BODY };
            let body = response_body::read(response.into_body(), kept).await?;
            Ok::<_, ExchangeError>((answer, body))
        };
        let broken = match tokio::time::timeout(request.timeout, exchange).await {
            Ok(Ok((answer, body))) => {
                return Exchange { outcome: answer.outcome(&body, &request), response: Some(answer.kind()) };
            }
            Ok(Err(error)) => match error.denied() {
                Some(denied) => {
                    let outcome = Outcome::Failed(connection::egress_denied(&request.endpoint, denied));
                    return Exchange { outcome, response: None };
                }
                None => error.failure(&request.endpoint, self.connect_timeout),
            },
            Err(_) => connection::timed_out(&request, head.is_some()),
        };
        match head {
            Some(answer) if !answer.is_delivery() => {
                Exchange { outcome: answer.outcome(&[], &request), response: Some(answer.kind()) }
            }
            _ => {
                let kind = match broken.code == StatusCode::GATEWAY_TIMEOUT.as_str() {
                    true => ResponseKind::TimedOut,
                    false if head.is_some() => ResponseKind::Responded,
                    false => ResponseKind::NoConnection,
                };
                Exchange { outcome: Outcome::Failed(broken), response: Some(kind) }
            }
        }
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("user_agent", &self.user_agent).finish_non_exhaustive()
    }
}

fn tls_config(extra_roots: Vec<CertificateDer<'static>>) -> ClientConfig {
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        warn!(%error, "cannot read a certificate authority of the operating system");
    }
    let mut roots = RootCertStore::empty();
    let (mut trusted, _) = roots.add_parsable_certificates(native.certs);
    trusted += roots.add_parsable_certificates(extra_roots).0;
    if trusted == 0 {
        warn!("no certificate authorities found: https endpoints will fail with 525; install ca-certificates");
    }
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring implements the default TLS versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

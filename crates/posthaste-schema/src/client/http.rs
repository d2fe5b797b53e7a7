use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, USER_AGENT};
use hyper::{Method, Request, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use posthaste_core::{Backoff, BoxError, lock};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::Instant;
use url::Url;

use super::options::{Base, ClientOptions};
use crate::registry::RegistryError;

const CONTENT: &str = "application/vnd.schemaregistry.v1+json";
const ACCEPTED: &str = "application/vnd.schemaregistry.v1+json, application/json; q=0.9";
/// The largest body of an answer. A schema has at most 1 MiB.
const MAX_ANSWER: usize = 2 * 1024 * 1024;
/// The largest head of an answer.
const MAX_HEAD: usize = 32 * 1024;

/// Sends requests to the first URL that works.
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    options: ClientOptions,
    /// The URL that worked last.
    current: AtomicUsize,
    /// Until when the registry counts as out of reach, and why.
    unreachable: Mutex<Option<(Instant, RegistryError)>>,
}

/// One request, without the base of its URL.
pub(super) struct Call<'a> {
    pub(super) method: Method,
    pub(super) path: &'a [&'a str],
    pub(super) body: Option<Bytes>,
}

/// An answer that is neither an overload nor an internal error.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
    /// The URL of the registry that gave it, for people.
    pub(super) from: String,
}

/// Why a URL gave no answer.
enum Failed {
    /// It cannot be reached, or closed the connection.
    Broken(String),
    TimedOut,
    /// It answers that it does not work.
    Status(StatusCode),
    /// It answers, but nothing that a registry would. Another attempt would not help.
    Nonsense(String),
}

impl Http {
    pub(super) fn new(options: ClientOptions) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(options.connect_timeout));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls_config(&options))
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(4)
            .http1_max_buf_size(MAX_HEAD)
            .build(connector);
        Self { client, options, current: AtomicUsize::new(0), unreachable: Mutex::default() }
    }

    pub(super) fn options(&self) -> &ClientOptions {
        &self.options
    }

    /// The next request goes to another URL first.
    pub(super) fn prefer_another(&self) {
        let next = |current: usize| Some((current + 1) % self.options.bases.len());
        // It never fails: there always is a next one.
        let _ = self.current.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Sends a request to one URL after the other, and to all again after a pause. Every request of a registry may be
    /// repeated: it has the same effect.
    pub(super) async fn send(&self, call: Call<'_>) -> Result<Answer, RegistryError> {
        if let Some((until, error)) = &*lock(&self.unreachable)
            && Instant::now() < *until
        {
            return Err(error.clone());
        }
        let bases = &self.options.bases;
        let mut usable: Vec<usize> = (0..bases.len()).collect();
        usable.rotate_left(self.current.load(Ordering::Relaxed));
        let mut backoff = Backoff::new(self.options.first_pause, self.options.first_pause * 16);
        let mut last: Vec<Option<Failed>> = bases.iter().map(|_| None).collect();
        for attempt in 0..self.options.attempts.max(1) {
            if attempt > 0 {
                tokio::time::sleep(backoff.next_pause()).await;
            }
            for index in usable.clone() {
                match self.exchange(&bases[index], &call).await {
                    Ok(answer) => {
                        self.current.store(index, Ordering::Relaxed);
                        *lock(&self.unreachable) = None;
                        return Ok(answer);
                    }
                    Err(failed) => {
                        // A URL that hangs or answers nonsense is not tried again: it would cost as much time again.
                        if matches!(failed, Failed::TimedOut | Failed::Nonsense(_)) {
                            usable.retain(|other| *other != index);
                        }
                        last[index] = Some(failed);
                    }
                }
            }
            if usable.is_empty() {
                break;
            }
        }
        Err(self.failed(last))
    }

    fn failed(&self, last: Vec<Option<Failed>>) -> RegistryError {
        let is_silent = last.iter().flatten().all(|failed| matches!(failed, Failed::Broken(_) | Failed::TimedOut));
        let timeout = self.options.request_timeout;
        let reasons = self.options.bases.iter().zip(last).filter_map(|(base, failed)| {
            let reason = match failed? {
                Failed::Broken(reason) => reason,
                Failed::TimedOut => format!("no complete answer within {timeout:?}"),
                Failed::Status(status) => format!("it answers {status}"),
                Failed::Nonsense(reason) => reason,
            };
            Some(format!("{}: {reason}", base.shown()))
        });
        let error = RegistryError::unavailable(reasons.collect::<Vec<_>>().join("; "));
        if is_silent {
            *lock(&self.unreachable) = Some((Instant::now() + self.options.failure_memory, error.clone()));
        }
        error
    }

    async fn exchange(&self, base: &Base, call: &Call<'_>) -> Result<Answer, Failed> {
        let request = request(base, call).map_err(Failed::Nonsense)?;
        let exchange = async {
            let response = self.client.request(request).await.map_err(|error| Failed::Broken(causes(&error)))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(unreadable)?;
            match status {
                StatusCode::TOO_MANY_REQUESTS => Err(Failed::Status(status)),
                status if status.is_server_error() => Err(Failed::Status(status)),
                status => Ok(Answer { status, body: body.to_bytes(), from: base.shown().to_owned() }),
            }
        };
        match tokio::time::timeout(self.options.request_timeout, exchange).await {
            Ok(result) => result,
            Err(_) => Err(Failed::TimedOut),
        }
    }
}

fn unreadable(error: BoxError) -> Failed {
    match error.is::<LengthLimitError>() {
        true => Failed::Nonsense(format!("its answer has more than {MAX_ANSWER} bytes")),
        false => Failed::Broken(causes(&*error)),
    }
}

fn request(base: &Base, call: &Call<'_>) -> Result<Request<Full<Bytes>>, String> {
    let url = url_of(&base.url, call.path);
    let mut request = Request::builder().method(call.method.clone()).uri(url.as_str()).header(ACCEPT, ACCEPTED);
    request = request.header(USER_AGENT, HeaderValue::from_static(concat!("posthaste/", env!("CARGO_PKG_VERSION"))));
    if let Some(authorization) = &base.authorization {
        request = request.header(AUTHORIZATION, authorization.clone());
    }
    if call.body.is_some() {
        request = request.header(CONTENT_TYPE, CONTENT);
    }
    let body = Full::new(call.body.clone().unwrap_or_default());
    request.body(body).map_err(|error| format!("the request cannot be built: {error}"))
}

/// Adds segments to a URL and escapes them.
fn url_of(base: &Url, path: &[&str]) -> Url {
    let mut url = base.clone();
    // Fails only for URLs that cannot have a path, and these are refused by the options.
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty().extend(path);
    }
    url
}

/// An error and its causes. Without the first: it says only that a request failed.
fn causes(error: &(dyn Error + 'static)) -> String {
    let causes: Vec<String> =
        std::iter::successors(error.source(), |&cause| cause.source()).map(ToString::to_string).collect();
    if causes.is_empty() { error.to_string() } else { causes.join(": ") }
}

fn tls_config(options: &ClientOptions) -> ClientConfig {
    let native = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (found, _) = roots.add_parsable_certificates(native.certs);
    let (given, _) = roots.add_parsable_certificates(options.extra_roots.iter().cloned());
    if found + given == 0 && options.bases.iter().any(|base| base.url.scheme() == "https") {
        tracing::warn!("no certificate authorities found: the schema registry cannot be reached by https");
    }
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring implements the default TLS versions")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

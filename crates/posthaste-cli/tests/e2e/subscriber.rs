use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::routing::post;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// The endpoint of a subscriber. Remembers every request and responds with the status that the test sets.
#[derive(Clone)]
pub struct Subscriber(Arc<Inner>);

struct Inner {
    arrivals: Mutex<Vec<Arrival>>,
    arrived: Notify,
    status: Mutex<StatusCode>,
    /// The response to this many first requests.
    first: Mutex<(u64, StatusCode)>,
    answers_after: AtomicU64,
    answered: AtomicU64,
    /// False while it hangs: requests then get no response.
    responds: watch::Sender<bool>,
    /// Requests that have no response yet, and whose connection is open.
    open: AtomicUsize,
    address: SocketAddr,
    server: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Clone)]
pub struct Arrival {
    pub event_id: String,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Subscriber {
    /// Starts a subscriber that listens.
    pub async fn start() -> Self {
        let subscriber = Self::down();
        subscriber.come_up().await;
        subscriber
    }

    /// A subscriber that has an address but does not listen until `come_up`.
    pub fn down() -> Self {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        Self(Arc::new(Inner {
            arrivals: Mutex::default(),
            arrived: Notify::new(),
            status: Mutex::new(StatusCode::OK),
            first: Mutex::default(),
            answers_after: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            responds: watch::Sender::new(true),
            open: AtomicUsize::new(0),
            address: probe.local_addr().expect("an address"),
            server: Mutex::default(),
        }))
    }

    pub async fn come_up(&self) {
        let listener = tokio::net::TcpListener::bind(self.0.address).await.expect("the port is still free");
        let limit = axum::extract::DefaultBodyLimit::max(4 * 1024 * 1024);
        let app = Router::new().route("/hook", post(receive)).layer(limit).with_state(self.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await.expect("it serves") });
        *self.0.server.lock().unwrap() = Some(server);
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}/hook", self.0.address)
    }

    pub fn answer(&self, status: StatusCode) {
        *self.0.status.lock().unwrap() = status;
    }

    /// Responds to this many first requests with this status, and to the others as `answer` says.
    pub fn answer_first(&self, count: u64, status: StatusCode) {
        *self.0.first.lock().unwrap() = (count, status);
    }

    pub fn answer_after(&self, wait: Duration) {
        self.0.answers_after.store(wait.as_millis() as u64, Ordering::Relaxed);
    }

    /// Responds to nothing, until `recover`.
    pub fn hang(&self) {
        self.0.responds.send_replace(false);
    }

    /// Responds again, also to the requests that wait.
    pub fn recover(&self) {
        self.0.responds.send_replace(true);
    }

    /// How many requests wait for a response.
    pub fn open_requests(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    /// How many requests got a response.
    pub fn answered(&self) -> u64 {
        self.0.answered.load(Ordering::Relaxed)
    }

    pub fn arrivals(&self) -> Vec<Arrival> {
        self.0.arrivals.lock().unwrap().clone()
    }

    pub fn counts(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        self.0.arrivals.lock().unwrap().iter().for_each(|arrival| {
            *counts.entry(arrival.event_id.clone()).or_default() += 1;
        });
        counts
    }

    /// Waits until `enough` returns true for the arrivals. Fails when nothing has arrived for a minute: how long many
    /// requests take depends on the machine.
    pub async fn wait_until(&self, what: &str, enough: impl Fn(&[Arrival]) -> bool) {
        loop {
            let arrived = self.0.arrived.notified();
            if enough(&self.0.arrivals.lock().unwrap()) {
                return;
            }
            let in_time = tokio::time::timeout(Duration::from_secs(60), arrived).await;
            assert!(in_time.is_ok(), "timed out waiting for {what}: {} arrived", self.arrivals().len());
        }
    }

    pub async fn wait_for(&self, count: usize) -> Vec<Arrival> {
        self.wait_until(&format!("{count} requests"), |arrivals| arrivals.len() >= count).await;
        self.arrivals()
    }
}

async fn receive(State(subscriber): State<Subscriber>, uri: Uri, headers: HeaderMap, body: Bytes) -> StatusCode {
    let inner = &subscriber.0;
    let event_id = headers["webhook-id"].to_str().expect("an id is ASCII").to_owned();
    inner.arrivals.lock().unwrap().push(Arrival { event_id, uri, headers, body });
    inner.arrived.notify_waiters();
    let _open = Open::count(&inner.open);
    inner
        .responds
        .subscribe()
        .wait_for(|responds| *responds)
        .await
        .expect("the sender lives as long as the subscriber");
    let wait = inner.answers_after.load(Ordering::Relaxed);
    if wait > 0 {
        tokio::time::sleep(Duration::from_millis(wait)).await;
    }
    let before = inner.answered.fetch_add(1, Ordering::Relaxed);
    let (count, status) = *inner.first.lock().unwrap();
    if before < count { status } else { *inner.status.lock().unwrap() }
}

/// Counts a request until it has a response or its client has closed the connection.
struct Open<'a>(&'a AtomicUsize);

impl<'a> Open<'a> {
    fn count(open: &'a AtomicUsize) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(open)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use posthaste_core::lock;
use tokio::net::{TcpListener, TcpSocket};
use uuid::Uuid;

/// How many connections may wait to be accepted; the server opens at most one for each lane.
const BACKLOG: u32 = 1_024;

/// How a subscriber reacts to requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Accepts every request.
    Healthy,
    /// Refuses a third of its requests, at random.
    Flaky,
    /// Refuses every request until it comes up; then it accepts every request.
    Down,
}

/// The HTTP server of one subscriber.
pub struct Subscriber {
    name: &'static str,
    address: SocketAddr,
    received: Arc<Received>,
    /// Ids of the dead letters that were replayed at least once.
    replayed: Mutex<HashSet<Uuid>>,
    is_down: Arc<AtomicBool>,
}

#[derive(Default)]
struct Received {
    ids: Mutex<HashSet<String>>,
    duplicates: AtomicU64,
}

impl Subscriber {
    pub async fn start(name: &'static str, manner: Manner) -> anyhow::Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((Ipv4Addr::LOCALHOST, 0).into()).context("no free port on loopback")?;
        let address = socket.local_addr()?;
        let (received, is_down) = (Arc::default(), Arc::new(AtomicBool::new(manner == Manner::Down)));
        serve(socket.listen(BACKLOG)?, manner, Arc::clone(&received), is_down.clone());
        Ok(Self { name, address, received, replayed: Mutex::default(), is_down })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}/{}", self.address, self.name)
    }

    pub fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    /// From now on a subscriber that was down accepts every request.
    pub fn come_up(&self) {
        self.is_down.store(false, Ordering::Relaxed);
    }

    /// How many different events the subscriber has accepted.
    pub fn arrived(&self) -> u64 {
        lock(&self.received.ids).len() as u64
    }

    pub fn has(&self, event_id: &str) -> bool {
        lock(&self.received.ids).contains(event_id)
    }

    /// How often the subscriber accepted an event that it had accepted before.
    pub fn duplicates(&self) -> u64 {
        self.received.duplicates.load(Ordering::Relaxed)
    }

    pub fn add_replayed(&self, dead_letters: impl Iterator<Item = Uuid>) {
        lock(&self.replayed).extend(dead_letters);
    }

    pub fn replayed(&self) -> usize {
        lock(&self.replayed).len()
    }
}

fn serve(listener: TcpListener, manner: Manner, received: Arc<Received>, is_down: Arc<AtomicBool>) {
    let answer = move |headers: HeaderMap| {
        let (received, is_down) = (received.clone(), is_down.clone());
        async move {
            if is_down.load(Ordering::Relaxed) || (manner == Manner::Flaky && fastrand::u8(0..3) == 0) {
                return StatusCode::SERVICE_UNAVAILABLE;
            }
            let Some(id) = headers.get("webhook-id").and_then(|id| id.to_str().ok()) else {
                return StatusCode::BAD_REQUEST;
            };
            if !lock(&received.ids).insert(id.to_owned()) {
                received.duplicates.fetch_add(1, Ordering::Relaxed);
            }
            StatusCode::NO_CONTENT
        }
    };
    let app = Router::new().route("/{name}", post(answer));
    tokio::spawn(async move { axum::serve(listener, app).await });
}

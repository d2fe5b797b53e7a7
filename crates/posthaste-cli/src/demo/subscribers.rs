use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use posthaste_core::lock;
use tokio::net::{TcpListener, TcpSocket};
use uuid::Uuid;

/// How many connections may wait; the server opens at most as many as it has lanes.
const BACKLOG: u32 = 1_024;

/// How a subscriber treats its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Takes all.
    Healthy,
    /// Refuses one in three, at random.
    Flaky,
    /// Is not there until it comes up; then it takes all.
    Down,
}

/// An HTTP server of somebody who subscribed.
pub struct Subscriber {
    name: &'static str,
    address: SocketAddr,
    received: Arc<Received>,
    /// Letters, each counted once however often it was replayed.
    replayed: Mutex<HashSet<Uuid>>,
    /// A socket that is bound keeps its port; until it listens, connections are refused.
    closed: Mutex<Option<TcpSocket>>,
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
        let received = Arc::default();
        let closed = match manner {
            Manner::Down => Some(socket),
            _ => {
                serve(socket.listen(BACKLOG)?, manner, Arc::clone(&received));
                None
            }
        };
        Ok(Self { name, address, received, replayed: Mutex::default(), closed: Mutex::new(closed) })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}/{}", self.address, self.name)
    }

    pub fn is_down(&self) -> bool {
        lock(&self.closed).is_some()
    }

    /// Listens from now on, if it did not before.
    pub fn come_up(&self) -> anyhow::Result<()> {
        if let Some(socket) = lock(&self.closed).take() {
            serve(socket.listen(BACKLOG)?, Manner::Healthy, self.received.clone());
        }
        Ok(())
    }

    /// How many different events it has taken.
    pub fn arrived(&self) -> u64 {
        lock(&self.received.ids).len() as u64
    }

    pub fn has(&self, event_id: &str) -> bool {
        lock(&self.received.ids).contains(event_id)
    }

    /// How often it took an event that it had already.
    pub fn duplicates(&self) -> u64 {
        self.received.duplicates.load(Ordering::Relaxed)
    }

    pub fn add_replayed(&self, letters: impl Iterator<Item = Uuid>) {
        lock(&self.replayed).extend(letters);
    }

    pub fn replayed(&self) -> usize {
        lock(&self.replayed).len()
    }
}

fn serve(listener: TcpListener, manner: Manner, received: Arc<Received>) {
    let answer = move |headers: HeaderMap| {
        let received = received.clone();
        async move {
            if manner == Manner::Flaky && fastrand::u8(0..3) == 0 {
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

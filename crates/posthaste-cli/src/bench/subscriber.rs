use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use tokio::net::TcpListener;
use tokio::sync::Notify;

/// An endpoint that counts its requests.
#[derive(Clone)]
pub struct Subscriber {
    address: SocketAddr,
    inbox: Arc<Inbox>,
}

#[derive(Default)]
struct Inbox {
    count: AtomicUsize,
    arrived: Notify,
}

impl Subscriber {
    pub async fn start() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let inbox = Arc::new(Inbox::default());
        let app = Router::new().route("/hook", post(receive)).with_state(inbox.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { address, inbox })
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    pub fn count(&self) -> usize {
        self.inbox.count.load(Ordering::Relaxed)
    }

    /// Waits until this many requests have arrived since the start.
    pub async fn wait_for(&self, count: usize) {
        loop {
            let arrived = self.inbox.arrived.notified();
            if self.count() >= count {
                return;
            }
            arrived.await;
        }
    }
}

async fn receive(State(inbox): State<Arc<Inbox>>, _: Bytes) -> StatusCode {
    inbox.count.fetch_add(1, Ordering::Relaxed);
    inbox.arrived.notify_waiters();
    StatusCode::NO_CONTENT
}

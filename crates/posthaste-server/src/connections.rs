use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::write_timeout::WriteTimeout;

/// How long running requests may take after a stop.
const LAST_REQUESTS: Duration = Duration::from_secs(10);
/// The pause after the operating system failed to accept a connection.
const NO_ROOM: Duration = Duration::from_secs(1);

/// The limits for the clients of the server.
#[derive(Clone, Copy, Debug)]
pub struct ClientLimits {
    /// How long a client may take for the head of a request, and how long a connection may stay idle before it.
    pub header_timeout: Duration,
    /// How long a client may take for the body of a request, and how long it may read nothing of a response.
    pub body_timeout: Duration,
    /// The maximum number of open connections. Other clients wait in the queue of the operating system.
    pub max_connections: usize,
}

/// Serves requests until `stop`, then finishes those that are running.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: ClientLimits, stop: CancellationToken) {
    let free = Arc::new(Semaphore::new(limits.max_connections.max(1)));
    let mut connections = JoinSet::new();
    let accepting = async {
        while let Ok(permit) = free.clone().acquire_owned().await {
            let stream = accept(&listener).await;
            let answering = answer(stream, router.clone(), limits, stop.clone());
            connections.spawn(async move {
                answering.await;
                drop(permit);
            });
            // Removes connections that have ended.
            while connections.try_join_next().is_some() {}
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = accepting => {}
    }
    drop(listener);
    let finishing = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_REQUESTS, finishing).await.is_err() {
        tracing::warn!("closing connections whose requests are still running");
    }
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            // The client disconnected while it waited, which does not affect others.
            Err(error) if is_of_one_client(&error) => {}
            Err(error) => {
                tracing::error!(%error, "failed to accept connections; trying again");
                tokio::time::sleep(NO_ROOM).await;
            }
        }
    }
}

fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn answer(stream: TcpStream, router: Router, limits: ClientLimits, stop: CancellationToken) {
    // A response is one small write; waiting for more to send would only delay it.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "failed to set TCP_NODELAY on a connection");
    }
    let stream = TokioIo::new(WriteTimeout::new(stream, limits.body_timeout));
    let mut http = http1::Builder::new();
    // Without a timer, hyper applies no timeout.
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout);
    let mut connection = pin!(http.serve_connection(stream, TowerToHyperService::new(router)));
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

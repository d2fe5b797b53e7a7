//! Clients that send or read too slowly, over real sockets.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::process::{Installation, Server, until};

/// Far longer than the timeouts of the servers here, even on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

async fn start_with_short_timeouts(more: &[(&str, &str)]) -> (Installation, Server) {
    let limits = [("HTTP__HEADER_TIMEOUT", "300ms"), ("HTTP__BODY_TIMEOUT", "300ms")];
    let installation = Installation::new(&[&limits[..], more].concat());
    let server = installation.start().await;
    (installation, server)
}

/// Sends `text`, then waits until the server closes the connection. Returns everything that the server sent.
async fn send_and_wait_for_close(server: &Server, text: &str) -> String {
    let mut client = TcpStream::connect(server.api.address()).await.unwrap();
    client.write_all(text.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let closed = timeout(TEST_TIMEOUT, client.read_to_end(&mut answer)).await;
    closed.expect("the server closes the connection").expect("the connection ends without an error");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_with_an_incomplete_header_is_closed() {
    let (_installation, server) = start_with_short_timeouts(&[]).await;
    send_and_wait_for_close(&server, "POST /api/events HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await;
    send_and_wait_for_close(&server, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_with_an_incomplete_body_is_closed() {
    let (_installation, server) = start_with_short_timeouts(&[]).await;
    let head = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
    };
    for path in ["/api/events", "/api/events/batch", "/api/subscriptions", "/api/replay"] {
        let answer = send_and_wait_for_close(&server, &(head(path) + "{\"eventType\":")).await;
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("\"request_timeout\""), "{path}: {answer}");
    }
    let answer = send_and_wait_for_close(&server, &(head("/api/nothing") + "{")).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_of_a_client_that_reads_nothing_is_closed() {
    let (_installation, server) = start_with_short_timeouts(&[]).await;
    let mut client = TcpStream::connect(server.api.address()).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(100);
    let end = Instant::now() + TEST_TIMEOUT;
    // When the buffers between both are full, the server cannot write and closes the connection.
    while let Ok(written) = timeout(TEST_TIMEOUT, client.write_all(request.as_bytes())).await {
        if written.is_err() {
            return;
        }
        assert!(Instant::now() < end, "the server has not closed the connection of a client that reads nothing");
    }
    panic!("the server neither reads nor closes the connection");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_above_the_connection_limit_wait_until_a_connection_is_closed() {
    let (_installation, server) =
        start_with_short_timeouts(&[("HTTP__MAX_CONNECTIONS", "4"), ("HTTP__HEADER_TIMEOUT", "2s")]).await;
    // The connections that waited for the start of the server are closed.
    until("the server accepts a connection", async || server.api.get("/healthz").await.ok()).await;
    let mut clients = Vec::new();
    for _ in 0..8 {
        let mut client = TcpStream::connect(server.api.address()).await.unwrap();
        client.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await.unwrap();
        clients.push(client);
    }
    let started = Instant::now();
    let mut last = TcpStream::connect(server.api.address()).await.unwrap();
    last.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    timeout(TEST_TIMEOUT, last.read_to_end(&mut answer))
        .await
        .expect("the server responds to the waiting client")
        .unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    assert!(
        started.elapsed() > Duration::from_secs(1),
        "the client waited for a free connection: {:?}",
        started.elapsed()
    );
}

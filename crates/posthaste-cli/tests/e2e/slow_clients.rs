//! Clients that send or read too slowly, over real sockets.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::process::{Installation, Server, until};

/// Far longer than the limits of the servers here, and than a busy machine needs.
const PATIENCE: Duration = Duration::from_secs(20);

async fn impatient(more: &[(&str, &str)]) -> (Installation, Server) {
    let limits = [("HTTP__HEADER_TIMEOUT", "300ms"), ("HTTP__BODY_TIMEOUT", "300ms")];
    let installation = Installation::new(&[&limits[..], more].concat());
    let server = installation.start().await;
    (installation, server)
}

/// Sends `text` and nothing more; answers with what the server says until it closes the connection.
async fn left_open(server: &Server, text: &str) -> String {
    let mut client = TcpStream::connect(server.api.address()).await.unwrap();
    client.write_all(text.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let closed = timeout(PATIENCE, client.read_to_end(&mut answer)).await;
    closed.expect("the server closes the connection").expect("the connection ends in order");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_header_is_cut_off() {
    let (_installation, server) = impatient(&[]).await;
    left_open(&server, "POST /api/events HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await;
    left_open(&server, "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_body_is_cut_off() {
    let (_installation, server) = impatient(&[]).await;
    let head = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
    };
    for path in ["/api/events", "/api/events/batch", "/api/subscriptions", "/api/replay"] {
        let answer = left_open(&server, &(head(path) + "{\"eventType\":")).await;
        assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("\"request_timeout\""), "{path}: {answer}");
    }
    let answer = left_open(&server, &(head("/api/nothing") + "{")).await;
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_cut_off() {
    let (_installation, server) = impatient(&[]).await;
    let mut client = TcpStream::connect(server.api.address()).await.unwrap();
    let request = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(100);
    let end = Instant::now() + PATIENCE;
    // The buffers between the two fill up; then the server writes in vain, and ends it.
    while let Ok(written) = timeout(PATIENCE, client.write_all(request.as_bytes())).await {
        if written.is_err() {
            return;
        }
        assert!(Instant::now() < end, "the server still bears a client that reads nothing");
    }
    panic!("the server neither reads nor closes the connection");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_bounded_and_the_next_client_has_its_turn() {
    let (_installation, server) = impatient(&[("HTTP__MAX_CONNECTIONS", "4"), ("HTTP__HEADER_TIMEOUT", "2s")]).await;
    // Its own connections of the start are gone.
    until("the server has idle places", async || server.api.get("/healthz").await.ok()).await;
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
    timeout(PATIENCE, last.read_to_end(&mut answer)).await.expect("its turn comes").unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    assert!(started.elapsed() > Duration::from_secs(1), "it waited for a place: {:?}", started.elapsed());
}

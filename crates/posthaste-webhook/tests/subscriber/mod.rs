//! A subscriber on a real socket, whose responses are given as bytes.
#![allow(dead_code, reason = "each test file is a program of its own and uses a part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use posthaste_core::{Failure, Outcome};
use posthaste_webhook::{Auth, Client, ClientOptions, EgressGuard, EgressPolicy, Endpoint, Request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Long enough that no test reaches it by accident.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Short enough that tests which wait for it stay quick.
pub const SHORT: Duration = Duration::from_secs(2);

/// A request as it came over the wire.
#[derive(Debug)]
pub struct Received {
    pub head: String,
    pub body: Vec<u8>,
}

impl Received {
    /// The values of a header, in order.
    pub fn header(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }
}

pub struct Subscriber {
    pub address: SocketAddr,
    connections: Arc<AtomicUsize>,
    received: mpsc::UnboundedReceiver<Received>,
}

impl Subscriber {
    /// Gives each accepted connection to `serve`, with a way to report what it received.
    pub async fn serving<F>(serve: impl Fn(TcpStream, mpsc::UnboundedSender<Received>) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (sender, received) = mpsc::unbounded_channel();
        let accepted = connections.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                accepted.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(stream, sender.clone()));
            }
        });
        Self { address, connections, received }
    }

    /// Responds to every request with the same bytes and keeps connections open.
    pub async fn answering(answer: impl Into<Vec<u8>>) -> Self {
        let answer: Arc<[u8]> = answer.into().into();
        Self::serving(move |mut stream, sender| {
            let answer = answer.clone();
            async move {
                while let Some(request) = read_request(&mut stream).await {
                    let _ = sender.send(request);
                    if stream.write_all(&answer).await.is_err() {
                        return;
                    }
                }
            }
        })
        .await
    }

    /// Responds to the first request with the bytes and closes the connection.
    pub async fn answering_once_and_closing(answer: impl Into<Vec<u8>>) -> Self {
        Self::answering_once(answer, false).await
    }

    /// Responds to the first request with the bytes and keeps the connection open without sending more.
    pub async fn answering_and_hanging(answer: impl Into<Vec<u8>>) -> Self {
        Self::answering_once(answer, true).await
    }

    async fn answering_once(answer: impl Into<Vec<u8>>, hangs: bool) -> Self {
        let answer: Arc<[u8]> = answer.into().into();
        Self::serving(move |mut stream, sender| {
            let answer = answer.clone();
            async move {
                let _ = sender.send(read_request(&mut stream).await.unwrap());
                stream.write_all(&answer).await.unwrap();
                if hangs {
                    // Ends when the client gives up.
                    let _ = stream.read(&mut [0; 1]).await;
                }
            }
        })
        .await
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub async fn next(&mut self) -> Received {
        self.received.recv().await.unwrap()
    }

    /// How many requests arrived that the test has not read.
    pub fn unread(&self) -> usize {
        self.received.len()
    }

    pub fn request(&self) -> Request {
        request(&format!("http://{}/hook", self.address))
    }
}

pub fn client() -> Client {
    Client::new(options())
}

/// The default options, and subscribers on the same machine are allowed.
pub fn options() -> ClientOptions {
    ClientOptions { egress: EgressGuard::new(EgressPolicy::allowing_loopback()), ..ClientOptions::default() }
}

pub fn request(endpoint: &str) -> Request {
    Request {
        endpoint: Endpoint::parse(endpoint).unwrap(),
        body: Bytes::from_static(b"{\"id\": 1}"),
        content_type: "application/json".into(),
        headers: Vec::new(),
        auth: Auth::None,
        timeout: PATIENCE,
    }
}

pub async fn failure_of(request: Request) -> Failure {
    match client().post(request).await {
        Outcome::Failed(failure) => failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

/// Reads one request with a `Content-Length`; `None` if the connection ends.
pub async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<Received> {
    let mut bytes = Vec::new();
    let head_length = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_length].to_vec()).unwrap();
    let mut received = Received { head, body: bytes.split_off(head_length) };
    let length: usize = received.header("content-length")[0].parse().unwrap();
    while received.body.len() < length {
        if stream.read_buf(&mut received.body).await.ok()? == 0 {
            return None;
        }
    }
    assert_eq!(received.body.len(), length, "more bytes than announced");
    Some(received)
}

//! A proxy that cuts connections.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use posthaste_core::lock;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// A TCP proxy in front of a database, for a fault that no server produces on demand: the connection breaks between a
/// `COMMIT` and its answer.
///
/// It searches the bytes of a connection, so the connection must not be encrypted. The servers of this module offer no
/// TLS.
pub struct Cutter {
    url: String,
    trap: Arc<watch::Sender<Trap>>,
    traffic: Arc<watch::Sender<Traffic>>,
    connections: Arc<Mutex<JoinSet<()>>>,
    accepting: AbortHandle,
}

/// The state of the simulated network.
#[derive(Default)]
struct Traffic {
    /// The number of connections so far.
    connections: u64,
    /// Connections up to this number are stalled: they stay open and forward nothing.
    stalled: u64,
    /// New connections are closed at once.
    is_refusing: bool,
}

/// What the proxy does with the data that triggers a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The proxy forwards the data to the server, but the client never gets the answer: a commit happened and the
    /// client does not know.
    Forwarded,
    /// The server never gets the data: a commit did not happen and the client does not know.
    Swallowed,
}

/// The states of a cut.
enum Trap {
    Unarmed,
    Armed { needle: Vec<u8>, keep: Keep },
    Cutting,
    Cut,
}

impl Cutter {
    /// Listens on a loopback port and forwards to the host and port of this URL. It connects to the server for each
    /// client connection, so the server may be stopped and started meanwhile.
    ///
    /// # Panics
    ///
    /// When the URL names no host and port.
    pub async fn to(url_of_database: &str) -> Self {
        let server = address(url_of_database);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let here = listener.local_addr().expect("an address").to_string();
        let url = url_of_database.replacen(server, &here, 1);
        let trap = Arc::new(watch::Sender::new(Trap::Unarmed));
        let traffic = Arc::new(watch::Sender::new(Traffic::default()));
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let proxy = Proxy { server: server.to_owned(), trap: Arc::clone(&trap), traffic: Arc::clone(&traffic) };
        let accepting = tokio::spawn(accept(listener, proxy, Arc::clone(&connections)));
        Self { url, trap, traffic, connections, accepting: accepting.abort_handle() }
    }

    /// The URL of the database through this proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Arms one cut, of the first connection whose client sends data that contains `needle`, such as `b"COMMIT"`. The
    /// server finishes what it got on that connection before the client sees the end of it.
    ///
    /// The search looks at one read of up to 64 KiB at a time. A small statement such as `COMMIT` arrives in one read.
    pub fn cut_when_sent(&self, needle: &[u8], keep: Keep) {
        assert!(!needle.is_empty(), "everything contains an empty needle");
        self.trap.send_replace(Trap::Armed { needle: needle.to_owned(), keep });
    }

    /// Waits until the armed cut has happened: both sides of the connection are closed.
    pub async fn cut(&self) {
        let mut trap = self.trap.subscribe();
        assert!(!matches!(*trap.borrow(), Trap::Unarmed), "arm the cut before you wait for it");
        trap.wait_for(|trap| matches!(trap, Trap::Cut)).await.expect("the sender is borrowed");
    }

    /// Puts the server out of reach: closes every connection, and closes new ones at once, until
    /// [`restore`](Self::restore).
    pub async fn take_away(&self) {
        self.traffic.send_modify(|traffic| traffic.is_refusing = true);
        self.cut_all().await;
    }

    /// Accepts new connections again.
    pub fn restore(&self) {
        self.traffic.send_modify(|traffic| traffic.is_refusing = false);
    }

    /// Stalls the connections that are open now: they forward nothing and stay open, as if a firewall dropped their
    /// packets. New connections work.
    pub fn stall(&self) {
        self.traffic.send_modify(|traffic| traffic.stalled = traffic.connections);
    }

    /// Closes every connection, and returns when that is done. New connections work.
    pub async fn cut_all(&self) {
        let mut connections = std::mem::take(&mut *lock(&self.connections));
        connections.shutdown().await;
        // The connection that was being cut may be among them.
        cut_is_done(&self.trap);
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        // Only this value and the accepting task own the set of connections. Dropping the set closes them.
        self.accepting.abort();
    }
}

/// The `host:port` of a URL.
fn address(url: &str) -> &str {
    let (_, rest) = url.split_once("://").unwrap_or_else(|| panic!("{url} is no URL"));
    let authority = rest.split(['/', '?']).next().unwrap_or(rest);
    let address = authority.rsplit('@').next().unwrap_or(authority);
    assert!(address.contains(':'), "{url} names no port");
    address
}

#[derive(Clone)]
struct Proxy {
    server: String,
    trap: Arc<watch::Sender<Trap>>,
    traffic: Arc<watch::Sender<Traffic>>,
}

async fn accept(listener: TcpListener, proxy: Proxy, connections: Arc<Mutex<JoinSet<()>>>) -> Infallible {
    loop {
        let (client, _) = listener.accept().await.expect("the loopback interface accepts");
        if proxy.traffic.borrow().is_refusing {
            continue;
        }
        let mut number = 0;
        proxy.traffic.send_modify(|traffic| {
            traffic.connections += 1;
            number = traffic.connections;
        });
        let proxy = proxy.clone();
        lock(&connections).spawn(async move {
            // A server that is down refuses; the client then sees its connection end.
            if let Ok(server) = TcpStream::connect(&proxy.server).await
                && relay(client, server, &proxy, number).await.is_some()
            {
                cut_is_done(&proxy.trap);
            }
        });
    }
}

/// Returns when this connection is stalled.
async fn stalled(traffic: &watch::Sender<Traffic>, number: u64) {
    let mut traffic = traffic.subscribe();
    if traffic.wait_for(|traffic| traffic.stalled >= number).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Marks the current cut as done. A cut that was armed since stays armed.
fn cut_is_done(trap: &watch::Sender<Trap>) {
    trap.send_if_modified(|trap| {
        let cutting = matches!(trap, Trap::Cutting);
        if cutting {
            *trap = Trap::Cut;
        }
        cutting
    });
}

/// Forwards both ways until one side closes or the trap springs, then closes both. Returns what the cut kept if the
/// trap sprang.
async fn relay(client: TcpStream, server: TcpStream, proxy: &Proxy, number: u64) -> Option<Keep> {
    // Without TCP_NODELAY every small statement would cost a delayed acknowledgement.
    client.set_nodelay(true).ok()?;
    server.set_nodelay(true).ok()?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (data, keep) = tokio::select! {
        sprung = forward(&mut from_client, &mut to_server, &proxy.trap) => sprung.ok()?,
        _ = copy(&mut from_server, &mut to_client) => return None,
        // Both sides stay open and get nothing.
        () = stalled(&proxy.traffic, number) => std::future::pending().await,
    };
    // From here on the proxy writes nothing to the client. The server processes in order what it got, then reads the
    // end of the stream and closes. Its close shows that it is done; its next bytes might be the answer to an earlier
    // statement. An error counts as a close, too.
    let finish = async {
        if keep == Keep::Forwarded {
            let _ = to_server.write_all(&data).await;
        }
        let _ = to_server.shutdown().await;
    };
    let mut nowhere = sink();
    let _ = tokio::join!(finish, copy(&mut from_server, &mut nowhere));
    Some(keep)
}

/// Forwards to the server until data comes that springs the trap, and returns that data.
async fn forward(
    client: &mut OwnedReadHalf,
    server: &mut OwnedWriteHalf,
    trap: &watch::Sender<Trap>,
) -> std::io::Result<(Vec<u8>, Keep)> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = client.read(&mut buffer).await?;
        if length == 0 {
            // The client has closed its sending half; the server may still send.
            server.shutdown().await?;
            std::future::pending::<Infallible>().await;
        }
        if let Some(keep) = spring(trap, &buffer[..length]) {
            buffer.truncate(length);
            return Ok((buffer, keep));
        }
        server.write_all(&buffer[..length]).await?;
    }
}

/// Springs the trap if it is armed and its needle is in this data. Only the first matching connection springs it.
fn spring(trap: &watch::Sender<Trap>, data: &[u8]) -> Option<Keep> {
    let mut sprung = None;
    trap.send_if_modified(|trap| {
        if let Trap::Armed { needle, keep } = trap
            && data.windows(needle.len()).any(|window| window == needle)
        {
            sprung = Some(*keep);
            *trap = Trap::Cutting;
        }
        sprung.is_some()
    });
    sprung
}

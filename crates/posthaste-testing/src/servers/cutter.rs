//! A proxy that cuts connections.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// A TCP proxy in front of a database, for faults that no server commits on demand: the connection that breaks between a
/// `COMMIT` and its answer.
///
/// It looks at bytes, so the connection must not be encrypted; the servers of this module offer no TLS.
pub struct Cutter {
    url: String,
    trap: Arc<watch::Sender<Trap>>,
    traffic: Arc<watch::Sender<Traffic>>,
    connections: Arc<Mutex<JoinSet<()>>>,
    accepting: AbortHandle,
}

/// What the network lets through.
#[derive(Default)]
struct Traffic {
    /// How many connections there were so far.
    connections: u64,
    /// Connections up to this one are stalled: they stay open, and nothing comes through.
    stalled: u64,
    /// New connections are closed at once.
    is_refusing: bool,
}

/// What becomes of the data that a cut waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The server gets it and acts on it, but the client never gets the answer: a commit happened and the client does not
    /// know.
    Forwarded,
    /// The server never gets it: a commit did not happen and the client does not know.
    Swallowed,
}

/// The life of a cut.
enum Trap {
    Unarmed,
    Armed { needle: Vec<u8>, keep: Keep },
    Cutting,
    Cut,
}

impl Cutter {
    /// Listens on a loopback port and forwards to the host and port of this URL, to which each connection is made anew:
    /// the server may be stopped and started behind it.
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

    /// Arms one cut: of the connection whose client is the next to send data with this in it, such as `b"COMMIT"`. The
    /// server is let finish what it got of that connection before the client sees the end of it.
    ///
    /// Only whole reads are looked at, of up to 64 KiB; small statements such as `COMMIT` arrive in one.
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

    /// The server is out of reach: every connection is closed, and new ones are closed at once, until [`restore`](Self::restore).
    pub async fn take_away(&self) {
        self.traffic.send_modify(|traffic| traffic.is_refusing = true);
        self.cut_all().await;
    }

    /// New connections are welcome again.
    pub fn restore(&self) {
        self.traffic.send_modify(|traffic| traffic.is_refusing = false);
    }

    /// Nothing comes through the connections that are open now, and neither side is told: as if a firewall had orphaned
    /// them. New ones are welcome.
    pub fn stall(&self) {
        self.traffic.send_modify(|traffic| traffic.stalled = traffic.connections);
    }

    /// Closes every connection, and returns when that is done. New ones are welcome.
    pub async fn cut_all(&self) {
        let mut connections = std::mem::take(&mut *self.connections.lock().unwrap_or_else(PoisonError::into_inner));
        connections.shutdown().await;
        // The connection whose turn it was may be among them.
        cut_is_done(&self.trap);
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        // The connections go with their set, which only this and the accepting task hold.
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
        connections.lock().unwrap_or_else(PoisonError::into_inner).spawn(async move {
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

/// Ends the cut under way; one that has been armed since stays armed.
fn cut_is_done(trap: &watch::Sender<Trap>) {
    trap.send_if_modified(|trap| {
        let cutting = matches!(trap, Trap::Cutting);
        if cutting {
            *trap = Trap::Cut;
        }
        cutting
    });
}

/// Forwards both ways until either side is gone or the trap springs, and closes both. Says what was kept if it sprang.
async fn relay(client: TcpStream, server: TcpStream, proxy: &Proxy, number: u64) -> Option<Keep> {
    // Bytes go on as they come: held back, every small statement would cost a delayed acknowledgement.
    client.set_nodelay(true).ok()?;
    server.set_nodelay(true).ok()?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let (data, keep) = tokio::select! {
        sprung = forward(&mut from_client, &mut to_server, &proxy.trap) => sprung.ok()?,
        _ = copy(&mut from_server, &mut to_client) => return None,
        // Both sides stay open, and neither hears anything.
        () = stalled(&proxy.traffic, number) => std::future::pending().await,
    };
    // From here on nobody writes to the client. The server acts in order on what it was sent, then meets the end and
    // closes: its end is the sign that it is done, where its next bytes might answer something earlier. An error is an
    // end, too.
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
            // The client has said all; the server may not have.
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

/// Springs the trap if it is armed for something in this data: for one connection only, whichever is first.
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

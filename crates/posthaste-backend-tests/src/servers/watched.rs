//! A server that a shell stops when its pipe to the test closes.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use posthaste_core::lock;

/// A running or stopped server with its data. When this value is dropped or the process ends, even if it is killed, the
/// shell that reads the pipe stops the server and removes its data.
pub(super) struct Server {
    port: u16,
    // Shared with the threads that wait for the shell, so that the other tasks of a test run while its server restarts.
    shell: Arc<Mutex<Shell>>,
}

impl Server {
    /// Runs the script of a kind of server, and returns when that server accepts connections.
    pub(super) async fn start(script: &'static str, settings: &str) -> Self {
        Self::start_on(free_port(), script, settings).await
    }

    /// The same on a port that the caller has chosen with [`free_port`].
    pub(super) async fn start_on(port: u16, script: &'static str, settings: &str) -> Self {
        let settings = settings.to_owned();
        let shell = blocking(move || Shell::start(script, port, &settings)).await;
        Self { port, shell: Arc::new(Mutex::new(shell)) }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Crashes the server and returns when its process has ended.
    pub(super) async fn stop(&self) {
        self.order("stop").await;
    }

    /// Stops the server as an administrator does, and returns when its process has ended.
    pub(super) async fn shut_down(&self) {
        self.order("shut_down").await;
    }

    /// Starts the stopped server with the data it left, and returns when it accepts connections.
    pub(super) async fn start_again(&self) {
        self.order("start").await;
    }

    async fn order(&self, order: &'static str) {
        let shell = Arc::clone(&self.shell);
        blocking(move || lock(&shell).obey(order)).await;
    }
}

/// A server for one test, to crash and start again. It is removed when the process ends, or when dropped.
///
/// Commits survive a crash of the server, but not a crash of the machine: the server does not wait for the disk.
pub struct CrashableServer {
    server: Server,
    url: String,
}

impl CrashableServer {
    pub(super) fn new(server: Server, url: String) -> Self {
        Self { server, url }
    }

    /// The URL of its database, the same through every restart.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Crashes the server and starts it again on the same port and data; returns when it accepts connections.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.start_again().await;
    }

    /// Crashes the server; returns when nothing listens on its port.
    pub async fn stop(&mut self) {
        self.server.stop().await;
    }

    /// Stops the server as an administrator does, without waiting for its clients; returns when its process has ended.
    pub async fn shut_down(&mut self) {
        self.server.shut_down().await;
    }

    /// Starts the stopped server on the same port and data; returns when it accepts connections.
    pub async fn start_again(&mut self) {
        self.server.start_again().await;
    }
}

/// Creates a database with a name that is unique in this process, and returns the name. `client` makes a command of the
/// SQL statement.
pub(super) async fn create_database(statement: &'static str, client: impl FnOnce(&str) -> Command) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let mut command = client(&statement.replace("{name}", &name));
    let created = blocking(move || command.output()).await;
    let created = created.expect("the server's script found its client program");
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    name
}

/// The shell that runs a server's script.
struct Shell {
    process: Child,
    // `None` only while the value is dropped.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Shell {
    fn start(script: &str, port: u16, settings: &str) -> Self {
        let mut process = Command::new("sh")
            .args(["-c", script, "server", &port.to_string(), settings])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A signal that ends the test, such as ^C, must not end the shell before it has cleaned up.
            .process_group(0)
            .spawn()
            .expect("a shell");
        let orders = process.stdin.take();
        let answers = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let mut shell = Self { process, orders, answers };
        shell.await_done("start");
        shell
    }

    fn obey(&mut self, order: &str) {
        let orders = self.orders.as_mut().expect("the shell takes orders until it is dropped");
        writeln!(orders, "{order}").expect("the server's script runs: it has not failed before");
        self.await_done(order);
    }

    fn await_done(&mut self, order: &str) {
        let mut said = String::new();
        loop {
            let from = said.len();
            self.answers.read_line(&mut said).expect("the server's script answers");
            match &said[from..] {
                "done\n" => return,
                "" => panic!("the server did not {order}:\n{said}"),
                _ => {}
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.orders.take());
        // Waits, so that the server is stopped when the drop returns. The shell ends by itself, so there is no error to
        // report.
        let _ = self.process.wait();
    }
}

/// A port below the range that the kernel gives to outgoing connections (from 32768). Otherwise an outgoing connection
/// could use the port of a stopped server, and a client of that port could even connect to itself.
pub(super) fn free_port() -> u16 {
    const FIRST: u32 = 20_000;
    const COUNT: u32 = 12_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes that start servers at the same time start their search at different ports.
    let from = (std::process::id() % COUNT) * 16;
    (0..COUNT)
        .map(|_| FIRST + (from + NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT)
        .map(|port| u16::try_from(port).expect("the range ends below 65536"))
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port between 20000 and 32000")
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use posthaste_backend_tests::servers;
use serde_json::Value;
use tempfile::TempDir;

use crate::api::Api;

/// A folder with a database. A test can start and stop servers on it.
pub struct Installation {
    pub folder: TempDir,
    address: SocketAddr,
    settings: Vec<(String, String)>,
}

/// The bus of an installation.
#[derive(Clone, Copy, PartialEq)]
pub enum Bus {
    BuiltIn,
    /// Kafka, with a Schema Registry of its own.
    Kafka,
}

/// Expands to each of these functions as a test on every bus.
macro_rules! on_each_bus {
    ($($test:ident)*) => {
        mod on_the_built_in_bus {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::$test(crate::process::Bus::BuiltIn).await;
                }
            )*
        }

        mod on_kafka {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::$test(crate::process::Bus::Kafka).await;
                }
            )*
        }
    };
}
pub(crate) use on_each_bus;

/// A running `posthaste serve`, killed when it goes out of scope.
pub struct Server {
    child: Child,
    pub api: Api,
}

impl Installation {
    /// `settings` are environment variables without the prefix `POSTHASTE__`.
    pub fn new(settings: &[(&str, &str)]) -> Self {
        // The port stays the same after a restart, so that clients can keep the address.
        let probe = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = probe.local_addr().expect("an address");
        let settings = settings.iter().map(|(key, value)| (format!("POSTHASTE__{key}"), (*value).to_owned()));
        Self { folder: tempfile::tempdir().expect("a folder"), address, settings: settings.collect() }
    }

    /// An installation with this bus.
    pub async fn on(bus: Bus, settings: &[(&str, &str)]) -> Self {
        let mut installation = Self::new(settings);
        if bus == Bus::Kafka {
            let (broker, prefix) = servers::kafka().await;
            installation.use_kafka(&broker, prefix.trim_end_matches('.'));
            installation.set("REGISTRY__URL", &servers::apicurio().await.0);
        }
        installation
    }

    /// Sets a key of the configuration. `key` is an environment variable without the prefix.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings.push((format!("POSTHASTE__{key}"), value.to_owned()));
    }

    /// Uses this broker, with topics that no other installation has.
    pub fn use_kafka(&mut self, broker: &str, topic_prefix: &str) {
        let url = format!("kafka://{broker}");
        let settings = [
            ("URL", url.as_str()),
            ("TOPIC_PREFIX", topic_prefix),
            ("REPLICATION", "1"),
            ("PARTITIONS", "3"),
            // The shortest time that a broker accepts by default, so that a killed server is replaced soon.
            ("KAFKA__SESSION_TIMEOUT_MS", "6000"),
        ];
        settings.iter().for_each(|(key, value)| self.set(&format!("BUS__{key}"), value));
    }

    pub fn database(&self) -> PathBuf {
        self.folder.path().join("posthaste.db")
    }

    pub fn api(&self) -> Api {
        Api::new(self.address)
    }

    /// Starts the server and waits until it is ready.
    pub async fn start(&self) -> Server {
        self.start_by(Command::new(env!("CARGO_BIN_EXE_posthaste"))).await
    }

    /// Starts the server so that none of its files can grow beyond this many blocks of 512 bytes, as on a full disk.
    pub async fn start_on_a_small_disk(&self, blocks: u32) -> Server {
        // Ignore SIGXFSZ, which would end the process: then the write fails instead.
        let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec {} \"$@\"", env!("CARGO_BIN_EXE_posthaste"));
        let mut shell = Command::new("sh");
        shell.args(["-c", &limited, "sh"]);
        self.start_by(shell).await
    }

    async fn start_by(&self, mut command: Command) -> Server {
        command
            .arg("serve")
            .current_dir(self.folder.path())
            .env("POSTHASTE__HTTP__LISTEN", self.address.to_string())
            .env("POSTHASTE__TELEMETRY__LOG", "warn")
            // A request does not time out because the machine is busy, unless the settings of the test say so.
            .env("POSTHASTE__DELIVERY__TIMEOUT", "60s")
            .env("POSTHASTE__DLT__TIMEOUT", "60s")
            .envs(self.settings.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log_file(self.folder.path()));
        let mut server = Server { child: command.spawn().expect("posthaste starts"), api: self.api() };
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = server.child.try_wait().expect("a child") {
                panic!("the server ended with {status}: {}", self.log());
            }
            // The response comes from this child: the port was free, and the child still runs.
            if server.api.get("/readyz").await.is_ok_and(|answer| answer.status == 200) {
                return server;
            }
            assert!(Instant::now() < end, "the server is not ready: {}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Runs a statement with the program `sqlite3`. It has a busy timeout, because the server may hold the write lock.
    pub fn run_sqlite3(&self, statement: &str) -> String {
        let ran = Command::new("sqlite3")
            .args(["-cmd", ".timeout 5000"])
            .arg(self.database())
            .arg(statement)
            .output()
            .expect("the program sqlite3 is installed: ./test does it, or apt-get install sqlite3");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).into_owned()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("server.log")).unwrap_or_default()
    }
}

fn log_file(folder: &Path) -> Stdio {
    let file = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("server.log"));
    file.expect("a log file").into()
}

impl Server {
    /// Ends the server with SIGKILL, as a crash would.
    pub fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    /// Ends the server with SIGTERM, as an orchestrator would.
    pub async fn terminate(mut self) -> ExitStatus {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().expect("kill runs");
        assert!(sent.success(), "the signal is sent");
        tokio::task::spawn_blocking(move || self.child.wait().expect("it ends")).await.expect("waited")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that the server has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Calls `poll` until it returns a value, and returns that value. `what` describes the expected state.
pub async fn until<T>(what: &str, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The items of a list response.
pub fn items(answer: &Value) -> &Vec<Value> {
    answer["items"].as_array().expect("items")
}

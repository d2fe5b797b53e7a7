use std::fs::Permissions;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use posthaste_backend_tests::servers;
use serde_json::Value;
use tempfile::TempDir;

use crate::api::Api;

/// A folder with a database file, or on a database server. A test can start and stop servers on it.
pub struct Installation {
    pub folder: TempDir,
    address: SocketAddr,
    settings: Vec<(String, String)>,
    /// The database, if it is not the file in the folder.
    database_url: Option<String>,
}

/// The database and the bus of an installation.
#[derive(Clone, Copy, PartialEq)]
pub enum Backend {
    /// SQLite, with the built-in bus.
    Sqlite,
    /// PostgreSQL, with the built-in bus.
    Postgres,
    /// PostgreSQL, Kafka, and a Schema Registry of its own.
    Kafka,
}

/// Expands to each of these functions as a test on every backend.
macro_rules! on_each_backend {
    ($($test:ident)*) => {
        crate::process::on_each_backend!(on_sqlite, Sqlite => $($test)*);
        crate::process::on_each_backend!(on_postgres, Postgres => $($test)*);
        crate::process::on_each_backend!(on_kafka, Kafka => $($test)*);
    };
    ($module:ident, $backend:ident => $($test:ident)*) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::$test(crate::process::Backend::$backend).await;
                }
            )*
        }
    };
}
pub(crate) use on_each_backend;

/// A running `posthaste serve`, killed when it goes out of scope.
pub struct Server {
    child: Child,
    pub api: Api,
}

impl Installation {
    /// `settings` are environment variables without the prefix `POSTHASTE__`.
    pub fn new(settings: &[(&str, &str)]) -> Self {
        let settings = settings.iter().map(|(key, value)| (format!("POSTHASTE__{key}"), (*value).to_owned()));
        Self::with(settings.collect(), None)
    }

    fn with(settings: Vec<(String, String)>, database_url: Option<String>) -> Self {
        // The port stays the same after a restart, so that clients can keep the address.
        let probe = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = probe.local_addr().expect("an address");
        Self { folder: tempfile::tempdir().expect("a folder"), address, settings, database_url }
    }

    /// An installation on this backend.
    pub async fn on(backend: Backend, settings: &[(&str, &str)]) -> Self {
        let mut installation = Self::new(settings);
        match backend {
            Backend::Sqlite => {}
            Backend::Postgres => installation.use_postgres(servers::postgres().await),
            Backend::Kafka => {
                let (broker, prefix) = servers::kafka().await;
                installation.use_postgres(servers::postgres().await);
                installation.use_kafka(&broker, prefix.trim_end_matches('.'));
                installation.set("REGISTRY__URL", &servers::apicurio().await.0);
            }
        }
        installation
    }

    /// The same installation on another port and in another folder, for a server beside the first.
    pub fn replica(&self) -> Self {
        assert!(self.database_url.is_some(), "a file is for one server");
        Self::with(self.settings.clone(), self.database_url.clone())
    }

    pub fn use_postgres(&mut self, url: String) {
        let key = self.folder.path().join("posthaste.key");
        std::fs::write(&key, "5".repeat(64)).expect("a key file");
        std::fs::set_permissions(&key, Permissions::from_mode(0o600)).expect("a key file");
        self.set("DATABASE__URL", &url);
        self.set("SECRETS__KEY_FILE", key.to_str().expect("UTF-8"));
        self.database_url = Some(url);
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

    /// Starts a server that does only a part of the work.
    pub async fn start_roles(&self, roles: &str) -> Server {
        // `start_by` adds the command, so a shell adds the flag after it.
        let with_roles = format!("exec {} \"$@\" --roles {roles}", env!("CARGO_BIN_EXE_posthaste"));
        let mut shell = Command::new("sh");
        shell.args(["-c", &with_roles, "sh"]);
        self.start_by(shell).await
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

    /// A command of the product in the folder of this installation.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_posthaste"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env("POSTHASTE__HTTP__LISTEN", self.address.to_string())
            .envs(self.settings.iter().map(|(key, value)| (key, value)));
        command
    }

    /// Writes the configuration file. Settings of the environment override it.
    pub fn write_config(&self, text: &str) {
        std::fs::write(self.folder.path().join("posthaste.toml"), text).expect("a configuration file");
    }

    /// A number that no other installation has at the same time.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// The URL of the database.
    pub fn database_url(&self) -> &str {
        self.database_url.as_deref().unwrap_or("sqlite://posthaste.db")
    }

    /// The environment variables of its servers.
    pub fn settings(&self) -> Vec<(String, String)> {
        self.settings.clone()
    }

    /// Runs a script of several statements, as an administrator would. Stops at the first error.
    pub fn run_script(&self, script: &str) {
        let mut command = Command::new(if self.database_url.is_some() { "psql" } else { "sqlite3" });
        match &self.database_url {
            Some(url) => command.args(["-X", "-q", "--set", "ON_ERROR_STOP=1", url]),
            None => command.arg(self.database()),
        };
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it runs");
        child.stdin.take().expect("stdin is piped").write_all(script.as_bytes()).expect("it reads the script");
        let ran = child.wait_with_output().expect("it ends");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    }

    /// Runs a statement as another program would.
    pub fn execute(&self, statement: &str) -> String {
        let Some(url) = &self.database_url else { return self.run_sqlite3(statement) };
        self.execute_on(url, statement)
    }

    /// Runs a statement on another PostgreSQL database.
    pub fn execute_on(&self, url: &str, statement: &str) -> String {
        let ran = Command::new("psql").args(["-X", "-q", "-A", "-t", "-c", statement, url]).output();
        let ran = ran.expect("the program psql is installed: ./test does it, or apt-get install postgresql-client");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).into_owned()
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

    /// Stops the process with SIGSTOP and continues it after this time, as a virtual machine that is moved.
    pub async fn pause_for(&self, time: Duration) {
        self.signal("STOP");
        tokio::time::sleep(time).await;
        self.signal("CONT");
    }

    /// Sends a signal, such as STOP.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(sent.expect("kill runs").success(), "the signal is sent");
    }

    /// Ends the server with SIGTERM, as an orchestrator would.
    pub async fn terminate(mut self) -> ExitStatus {
        self.signal("TERM");
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

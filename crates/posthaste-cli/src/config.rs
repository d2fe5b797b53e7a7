//! What can be configured: the sections of the hub as the hub declares them, and those of the process. `default_config.toml`
//! is the reference; a test holds it and these types together.

mod layers;
mod text;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use posthaste_api::duration_text;
use posthaste_hub::{DeliverySettings, DltSettings, OutboxSettings, RoutingSettings, Settings, Violation};
use posthaste_server::ClientLimits;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

pub use layers::{ConfigError, Layers};

/// The commented default configuration.
pub const DEFAULT_CONFIG: &str = include_str!("default_config.toml");

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub http: Http,
    pub database: Database,
    pub bus: Bus,
    pub outbox: OutboxSettings,
    pub routing: RoutingSettings,
    pub delivery: DeliverySettings,
    pub dlt: DltSettings,
    pub secrets: Secrets,
    pub telemetry: Telemetry,
    pub client: Client,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Http {
    #[serde(with = "text::address")]
    pub listen: SocketAddr,
    #[serde(with = "duration_text")]
    pub header_timeout: Duration,
    #[serde(with = "duration_text")]
    pub body_timeout: Duration,
    pub max_connections: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Database {
    pub url: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Bus {
    pub url: String,
    pub topic_prefix: String,
    pub max_channels: usize,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Secrets {
    pub key_file: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    pub log: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Client {
    pub server: String,
}

impl Config {
    /// The file behind the database's URL.
    pub fn database_file(&self) -> PathBuf {
        // Only a URL that the check below refuses has no file.
        posthaste_sql::sqlite::file_of(&self.database.url).unwrap_or_default()
    }

    /// Where the key is that seals subscribers' credentials.
    pub fn key_file(&self) -> PathBuf {
        match self.secrets.key_file.as_os_str().is_empty() {
            true => self.beside_database(".key"),
            false => self.secrets.key_file.clone(),
        }
    }

    /// The file whose lock shows that a server uses the database.
    pub fn lock_file(&self) -> PathBuf {
        self.beside_database(".lock")
    }

    fn beside_database(&self, ending: &str) -> PathBuf {
        let mut name = OsString::from(self.database_file());
        name.push(ending);
        name.into()
    }

    /// How much the HTTP server bears from its clients.
    pub fn client_limits(&self) -> ClientLimits {
        let Http { header_timeout, body_timeout, max_connections, .. } = self.http;
        ClientLimits { header_timeout, body_timeout, max_connections }
    }

    /// What the hub wants to know of it.
    pub fn settings(&self) -> Settings {
        let Self { bus, outbox, routing, delivery, dlt, .. } = self.clone();
        let Bus { topic_prefix, max_channels, .. } = bus;
        Settings { topic_prefix, max_channels, outbox, routing, delivery, dlt }
    }

    /// Every key whose value cannot be used, and why.
    fn violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut refuse = |key, refused: bool, why: &str| {
            if refused {
                found.push((key, why.to_owned()));
            }
        };
        let Self { http, database, bus, outbox, delivery, dlt, telemetry, .. } = self;
        if !http.listen.ip().is_loopback() {
            let why = "is not loopback: this version has no API keys yet, so anybody who reaches it could use it; \
                       write 127.0.0.1 or [::1]";
            refuse("http.listen", true, why);
        }
        refuse("http.header_timeout", http.header_timeout < MILLISECOND, "is shorter than 1ms");
        refuse("http.body_timeout", http.body_timeout < MILLISECOND, "is shorter than 1ms");
        refuse("http.max_connections", http.max_connections == 0, "is 0: nobody could connect");
        if let Some(why) = refused_database(&database.url) {
            refuse("database.url", true, &why);
        }
        if bus.url != "builtin" {
            let why = match bus.url.split_once("://") {
                Some(("kafka", _)) => "names Kafka, which is not built into this version yet: write \"builtin\"",
                _ => "is not \"builtin\", the only event bus of this version",
            };
            refuse("bus.url", true, why);
        }
        let is_topic = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        let prefix = &bus.topic_prefix;
        let bad_prefix = !(1..=100).contains(&prefix.len()) || !is_topic(prefix);
        refuse("bus.topic_prefix", bad_prefix, "is not 1 to 100 characters of A-Z a-z 0-9 . _ -");
        refuse("bus.max_channels", bus.max_channels == 0, "is 0: at least one event type needs a topic");
        if let Err(error) = EnvFilter::try_new(&telemetry.log) {
            refuse("telemetry.log", true, &format!("is no log filter, such as \"info\": {error}"));
        }
        found.extend(outbox.violations());
        found.extend(delivery.violations());
        found.extend(dlt.violations());
        found
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

fn refused_database(url: &str) -> Option<String> {
    let scheme = url.split(':').next().unwrap_or_default();
    match scheme {
        "sqlite" if url.contains(":memory:") || url.contains("mode=memory") => {
            Some("is in memory, where nothing survives a restart: write sqlite://FILE".to_owned())
        }
        "sqlite" if posthaste_sql::sqlite::file_of(url).is_some_and(|file| !file.as_os_str().is_empty()) => None,
        "postgres" | "postgresql" | "mysql" | "mariadb" => {
            Some(format!("names {scheme}, which is not built into this version yet: write sqlite://FILE"))
        }
        _ => {
            Some("is not the address of a database: write sqlite://FILE, for example sqlite://posthaste.db".to_owned())
        }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            max_connections: 512,
        }
    }
}

impl Default for Database {
    fn default() -> Self {
        Self { url: "sqlite://posthaste.db".to_owned() }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log: "info".to_owned() }
    }
}

impl Default for Bus {
    fn default() -> Self {
        let Settings { topic_prefix, max_channels, .. } = Settings::default();
        Self { url: "builtin".to_owned(), topic_prefix, max_channels }
    }
}

//! The configuration: the sections that the hub declares, and those of this process. `default_config.toml` is the
//! reference; a test compares it with these types.

mod layers;
mod text;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use posthaste_api::duration_text;
use posthaste_hub::{
    BusSettings, ChannelSettings, DeliverySettings, DltSettings, OutboxSettings, RetentionSettings, RoutingSettings,
    Settings, Violation,
};
use posthaste_server::ClientLimits;
use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

pub use layers::{ConfigError, Layers};

use crate::database;

/// The commented default configuration.
pub const DEFAULT_CONFIG: &str = include_str!("default_config.toml");

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub http: Http,
    pub database: Database,
    pub bus: BusSettings,
    pub registry: Registry,
    pub channels: Vec<ChannelSettings>,
    pub outbox: OutboxSettings,
    pub routing: RoutingSettings,
    pub delivery: DeliverySettings,
    pub dlt: DltSettings,
    pub retention: RetentionSettings,
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

/// The Schema Registry.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Registry {
    pub url: String,
    pub username: String,
    pub password: String,
    pub token: String,
}

/// All values may be or contain secrets.
impl fmt::Debug for Registry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Registry").finish_non_exhaustive()
    }
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
    /// The file with the key that seals the credentials of subscribers.
    pub fn key_file(&self) -> PathBuf {
        match self.secrets.key_file.as_os_str().is_empty() {
            true => database::default_key_file(&self.database.url),
            false => self.secrets.key_file.clone(),
        }
    }

    /// The limits that the HTTP server sets for its clients.
    pub fn client_limits(&self) -> ClientLimits {
        let Http { header_timeout, body_timeout, max_connections, .. } = self.http;
        ClientLimits { header_timeout, body_timeout, max_connections }
    }

    /// The sections of the hub.
    pub fn settings(&self) -> Settings {
        let Self { bus, channels, outbox, routing, delivery, dlt, retention, .. } = self.clone();
        Settings { bus, channels, outbox, routing, delivery, dlt, retention }
    }

    /// Every key that has an unusable value, with the reason.
    fn violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let mut refuse = |key, refused: bool, why: &str| {
            if refused {
                found.push((key, why.to_owned()));
            }
        };
        let Self { http, database, bus, outbox, delivery, dlt, telemetry, .. } = self;
        if !http.listen.ip().is_loopback() {
            let why = "is not loopback: this version has no API keys yet, so every program that connects could use it; \
                       write 127.0.0.1 or [::1]";
            refuse("http.listen", true, why);
        }
        refuse("http.header_timeout", http.header_timeout < MILLISECOND, "is shorter than 1ms");
        refuse("http.body_timeout", http.body_timeout < MILLISECOND, "is shorter than 1ms");
        refuse("http.max_connections", http.max_connections == 0, "is 0: no client could connect");
        if let Some(why) = database::refusal(&database.url) {
            refuse("database.url", true, &why);
        }
        if let Err(error) = EnvFilter::try_new(&telemetry.log) {
            refuse("telemetry.log", true, &format!("is not a log filter, such as \"info\": {error}"));
        }
        if let Some(why) = crate::bus::refusal(&bus.url) {
            found.push(("bus.url", why));
        }
        found.extend(bus.violations());
        if let Some(why) = crate::registry::refusal(&self.registry) {
            found.push(("registry.url", why));
        }
        found.extend(outbox.violations());
        found.extend(delivery.violations());
        found.extend(dlt.violations());
        found
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);

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

impl Default for Registry {
    fn default() -> Self {
        let (username, password, token) = Default::default();
        Self { url: "builtin".to_owned(), username, password, token }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log: "info".to_owned() }
    }
}

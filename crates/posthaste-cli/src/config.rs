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
    BusSettings, ChannelSettings, DeliverySettings, DltSettings, IngestSettings, OutboxSettings, RetentionSettings,
    RoutingSettings, Settings, SourceSettings, Violation,
};
use posthaste_server::ClientLimits;
use posthaste_webhook::{Cidr, EgressPolicy};
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
    pub ingest: IngestSettings,
    pub channels: Vec<ChannelSettings>,
    pub sources: Vec<SourceSettings>,
    pub outbox: OutboxSettings,
    pub routing: RoutingSettings,
    pub delivery: DeliverySettings,
    pub dlt: DltSettings,
    pub retention: RetentionSettings,
    pub egress: Egress,
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

#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Database {
    pub url: String,
    pub max_connections: u32,
}

/// The URL may contain a password.
impl fmt::Debug for Database {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Database").field("max_connections", &self.max_connections).finish_non_exhaustive()
    }
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

/// Where requests to subscribers may go.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Egress {
    /// Allowed beside public addresses.
    #[serde(with = "text::ranges")]
    pub allow: Vec<Cidr>,
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
        let default = || database::default_key_file(&self.database.url).unwrap_or_default();
        match self.secrets.key_file.as_os_str().is_empty() {
            true => default(),
            false => self.secrets.key_file.clone(),
        }
    }

    /// The limits that the HTTP server sets for its clients.
    pub fn client_limits(&self) -> ClientLimits {
        let Http { header_timeout, body_timeout, max_connections, .. } = self.http;
        ClientLimits { header_timeout, body_timeout, max_connections }
    }

    /// Decides to which addresses requests may be sent. It depends on every address that the server listens on.
    pub fn egress_policy(&self) -> EgressPolicy {
        EgressPolicy::of_server(&[self.http.listen], self.egress.allow.iter().copied())
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
        } else if self.key_file().as_os_str().is_empty() {
            let why = "is empty, and this database has no file beside which the key could be: write the path of a file that \
                       every server on the database has";
            refuse("secrets.key_file", true, why);
        }
        let few = database.max_connections < database::MIN_CONNECTIONS;
        refuse("database.max_connections", few, &format!("is less than {}", database::MIN_CONNECTIONS));
        if let Err(error) = EnvFilter::try_new(&telemetry.log) {
            refuse("telemetry.log", true, &format!("is not a log filter, such as \"info\": {error}"));
        }
        if let Some(why) = crate::bus::refusal(&bus.url) {
            found.push(("bus.url", why));
        }
        found.extend(bus.violations());
        if let Some(why) = crate::registry::refusal(&self.registry.url) {
            found.push(("registry.url", why));
        }
        found.extend(ChannelSettings::violations(&self.channels, bus));
        for channel in &self.channels {
            let event_type = &channel.event_type;
            if let Some(why) = channel.bus_url.as_deref().and_then(crate::bus::refusal_of_channel) {
                found.push(("channels", format!("has a channel {event_type:?} whose bus_url {why}")));
            }
            if let Some(why) = channel.registry_url.as_deref().and_then(crate::registry::refusal_of_channel) {
                found.push(("channels", format!("has a channel {event_type:?} whose registry_url {why}")));
            }
        }
        found.extend(SourceSettings::violations(&self.sources));
        found.extend(outbox.violations());
        found.extend(delivery.violations());
        found.extend(dlt.violations());
        found.extend(self.retention.violations(&self.ingest));
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
        // Three servers fit into the 100 connections that PostgreSQL allows by default.
        Self { url: "sqlite://posthaste.db".to_owned(), max_connections: 30 }
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

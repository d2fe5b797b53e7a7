use std::time::Duration;

use posthaste_api::Domain;

/// How the hub's services run. The defaults are those of the default configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    pub topic_prefix: String,
    pub outbox: OutboxSettings,
    pub routing: RoutingSettings,
    pub delivery: DeliverySettings,
    pub dlt: DltSettings,
    /// How many channels may be made by events of types that nobody has named before.
    pub max_channels: usize,
}

/// How rows leave the outbox table.
#[derive(Clone, Debug)]
pub struct OutboxSettings {
    pub poll_interval: Duration,
    pub batch_size: usize,
    pub max_attempts: u32,
    pub backoff_base: Duration,
    pub backoff_max: Duration,
    pub lease: Duration,
    pub drain: Duration,
}

/// Which domain an event belongs to.
#[derive(Clone, Debug)]
pub struct RoutingSettings {
    pub default_domain: Domain,
    pub rules: Vec<RoutingRule>,
}

/// Patterns with `*` for any run of characters; an absent one matches everything. The first rule that matches wins.
#[derive(Clone, Debug, Default)]
pub struct RoutingRule {
    pub resource_type: Option<String>,
    pub operation_type: Option<String>,
    pub event_type: Option<String>,
    pub domain: Option<Domain>,
}

/// How fresh events are delivered.
#[derive(Clone, Debug)]
pub struct DeliverySettings {
    pub timeout: Duration,
    pub max_retry: u32,
    /// How many requests to one subscription are under way at once.
    pub concurrency: usize,
}

/// How dead letters are delivered again.
#[derive(Clone, Debug)]
pub struct DltSettings {
    pub timeout: Duration,
    pub retry_interval: Duration,
    pub max_retry: u32,
    pub batch_size: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            topic_prefix: "posthaste".to_owned(),
            outbox: OutboxSettings {
                poll_interval: Duration::from_millis(500),
                batch_size: 500,
                max_attempts: 10,
                backoff_base: Duration::from_millis(200),
                backoff_max: Duration::from_secs(60),
                lease: Duration::from_secs(30),
                drain: Duration::from_secs(5),
            },
            routing: RoutingSettings { default_domain: Domain::Organization, rules: Vec::new() },
            delivery: DeliverySettings { timeout: Duration::from_secs(1), max_retry: 3, concurrency: 64 },
            dlt: DltSettings {
                timeout: Duration::from_secs(5),
                retry_interval: Duration::from_secs(3),
                max_retry: 3,
                batch_size: 100,
            },
            max_channels: 1_000,
        }
    }
}

use serde::{Deserialize, Serialize};

/// All sources: outbox tables in the databases of services.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceList {
    /// In the order of the configuration.
    pub items: Vec<SourceOut>,
}

/// A source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceOut {
    /// The name.
    pub name: String,
    /// The address of the database, without a password.
    pub database: String,
    /// The outbox table.
    pub table: String,
    /// How it is read.
    pub mode: SourceMode,
    /// Whether it can be read.
    pub status: SourceState,
    /// How many events are not published, counted up to 10,000; absent if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<u64>,
    /// For how long the oldest event has been due; absent if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<f64>,
    /// Why it cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// How a source is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SourceMode {
    /// By any number of servers, in no particular order.
    #[default]
    MultiNode,
    /// By any number of servers, the events of one aggregate one after the other.
    Ordered,
}

/// Whether a source can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceState {
    /// It is read.
    Up,
    /// It cannot be read now.
    Down,
    /// The configuration disables it.
    Paused,
}

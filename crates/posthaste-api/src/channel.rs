use serde::{Deserialize, Serialize};

/// All channels: the event types, and where their events are published.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelList {
    /// Sorted by event type.
    pub items: Vec<ChannelOut>,
}

/// A channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChannelOut {
    /// The event type.
    pub event_type: String,
    /// The topic to which its events are published.
    pub topic: String,
    /// Whether events are published.
    pub status: ChannelState,
    /// For how long the oldest event has been due, over all sources.
    pub lag_seconds: f64,
    /// Why events are not published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// Whether a channel publishes events. Events are accepted in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChannelState {
    /// Events are published.
    Running,
    /// An operator paused it: events wait.
    Paused,
    /// The configuration disables it: events wait.
    Disabled,
    /// The bus or the registry does not accept events: they wait.
    Failing,
}

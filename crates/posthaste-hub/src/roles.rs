use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A part of the pipeline that a process may run. Any number of processes may run the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Accepts events by REST.
    Ingest,
    /// Publishes the events of the outbox tables, also those of the sources, to their topics.
    Channels,
    /// Matches events to subscriptions.
    Processor,
    /// Sends events to subscribers.
    Delivery,
    /// Stores dead letters, and sends them again.
    Dlt,
    /// Serves operators: registrations, dead letters, topics, the Schema Registry.
    Api,
}

impl Role {
    pub const ALL: [Self; 6] = [Self::Ingest, Self::Channels, Self::Processor, Self::Delivery, Self::Dlt, Self::Api];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Channels => "channels",
            Self::Processor => "processor",
            Self::Delivery => "delivery",
            Self::Dlt => "dlt",
            Self::Api => "api",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// Text that names no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is none of ingest, channels, processor, delivery, dlt and api")]
pub struct UnknownRole;

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Self, UnknownRole> {
        Self::ALL.into_iter().find(|role| role.as_str() == text).ok_or(UnknownRole)
    }
}

/// The roles of a process. The default is all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roles(BTreeSet<Role>);

impl Default for Roles {
    fn default() -> Self {
        Self::of(Role::ALL)
    }
}

impl Roles {
    pub fn of(roles: impl IntoIterator<Item = Role>) -> Self {
        Self(roles.into_iter().collect())
    }

    pub fn has(&self, role: Role) -> bool {
        self.0.contains(&role)
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|role| role.as_str()).collect();
        formatter.write_str(&names.join(", "))
    }
}

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::suggest;

/// One of the four domains that separate deliveries: each has its own outbox topic and dead-letter topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Domain {
    /// People: created, changed, deleted.
    UserLifecycle,
    /// Logins, sessions and tokens.
    AccessSession,
    /// Policies and the clients they apply to.
    PolicyClient,
    /// Organizations, and by default all events that fit nowhere else.
    Organization,
}

/// A text that names none of the domains.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", suggest::unknown("domain", .0, &Domain::ALL.map(Domain::as_str)))]
pub struct UnknownDomain(pub String);

impl Domain {
    /// All domains.
    pub const ALL: [Self; 4] = [Self::UserLifecycle, Self::AccessSession, Self::PolicyClient, Self::Organization];

    /// The name in topics, JSON and configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UserLifecycle => "user-lifecycle",
            Self::AccessSession => "access-session",
            Self::PolicyClient => "policy-client",
            Self::Organization => "organization",
        }
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Domain {
    type Err = UnknownDomain;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|domain| domain.as_str() == text);
        found.ok_or_else(|| UnknownDomain(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_parsing_and_json_agree() {
        for domain in Domain::ALL {
            assert_eq!(domain.to_string().parse(), Ok(domain));
            assert_eq!(serde_json::to_string(&domain).unwrap(), format!("\"{domain}\""));
        }
    }

    #[test]
    fn an_unknown_domain_gets_a_suggestion() {
        let error = "user-lifecicle".parse::<Domain>().unwrap_err().to_string();
        assert_eq!(error, "unknown domain \"user-lifecicle\"; did you mean \"user-lifecycle\"?");
        let error = "billing".parse::<Domain>().unwrap_err().to_string();
        assert!(error.ends_with("known: user-lifecycle, access-session, policy-client, organization"), "{error}");
    }
}

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checks::Errors;

/// A write-only text: Debug output hides it, and no type that the server sends contains it.
///
/// It can be serialised because clients send it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

/// The credentials of a subscription as a caller sends them. In an update, an absent secret keeps its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE", deny_unknown_fields)]
pub enum AuthIn {
    /// None. Written as a struct because serde would accept unknown fields of a unit.
    None {},
    /// `Authorization: Basic`.
    BasicAuth {
        /// Responses show it.
        #[serde(default)]
        username: String,
        /// No response shows it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        password: Option<Secret>,
    },
    /// `Authorization: Bearer` with a shared token.
    HeaderToken {
        /// The token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<Secret>,
    },
    /// `Authorization: Bearer` with a shared JWT.
    JwtHeader {
        /// The token.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        token: Option<Secret>,
    },
}

/// The credentials of a subscription as the server returns them: their kind and what is no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum AuthOut {
    /// None.
    None,
    /// `Authorization: Basic`.
    BasicAuth {
        /// The name that is sent to the endpoint.
        username: String,
    },
    /// `Authorization: Bearer` with a shared token.
    HeaderToken,
    /// `Authorization: Bearer` with a shared JWT.
    JwtHeader,
}

impl Secret {
    /// The text itself, for sealing and sending.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl AuthOut {
    /// The name of its type, as the field `type` has it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::None => "NONE",
            Self::BasicAuth { .. } => "BASIC_AUTH",
            Self::HeaderToken => "HEADER_TOKEN",
            Self::JwtHeader => "JWT_HEADER",
        }
    }

    /// The type of this name, for credentials that cannot be opened. An unknown name is shown as none.
    pub fn of_type(name: &str) -> Self {
        let types = [Self::BasicAuth { username: String::new() }, Self::HeaderToken, Self::JwtHeader];
        types.into_iter().find(|auth| auth.type_name() == name).unwrap_or(Self::None)
    }
}

impl AuthIn {
    /// The parts that may be shown.
    pub fn public(&self) -> AuthOut {
        match self {
            Self::None {} => AuthOut::None,
            Self::BasicAuth { username, .. } => AuthOut::BasicAuth { username: username.clone() },
            Self::HeaderToken { .. } => AuthOut::HeaderToken,
            Self::JwtHeader { .. } => AuthOut::JwtHeader,
        }
    }

    /// True if its secret is absent, so that an update keeps the stored one.
    pub fn keeps_secret(&self) -> bool {
        match self {
            Self::None {} => false,
            Self::BasicAuth { password: secret, .. }
            | Self::HeaderToken { token: secret }
            | Self::JwtHeader { token: secret } => secret.is_none(),
        }
    }

    /// Adds an error for each value that no request could carry.
    pub(crate) fn check(&self, errors: &mut Errors) {
        match self {
            Self::None {} => {}
            Self::BasicAuth { username, password } => {
                if username.is_empty() {
                    errors.add("auth.username", "is empty");
                } else if username.contains(|character: char| character == ':' || character.is_control()) {
                    errors
                        .add("auth.username", "contains a colon or a control character, which HTTP Basic cannot carry");
                }
                if password.as_ref().is_some_and(|password| password.0.contains(char::is_control)) {
                    errors.add("auth.password", "contains a control character, which HTTP Basic cannot carry");
                }
            }
            Self::HeaderToken { token } | Self::JwtHeader { token } => {
                let is_writable =
                    |token: &Secret| !token.0.is_empty() && token.0.bytes().all(|byte| byte.is_ascii_graphic());
                if token.as_ref().is_some_and(|token| !is_writable(token)) {
                    errors.add("auth.token", "is empty or contains a space or a character outside ASCII");
                }
            }
        }
    }
}

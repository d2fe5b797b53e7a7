use std::fmt;

use serde::{Deserialize, Serialize};

use crate::checks::Errors;

/// A text that is written only: Debug output hides it, and no type that goes out of the server contains it.
///
/// It can be serialised because clients send it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

/// The credentials of a subscription as they come in. A secret that is absent keeps its value in an update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE", deny_unknown_fields)]
pub enum AuthIn {
    /// None. Written as a struct because serde would let unknown fields of a unit pass.
    None {},
    /// `Authorization: Basic`.
    BasicAuth {
        /// The part that is shown.
        #[serde(default)]
        username: String,
        /// The part that is not.
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

/// The credentials of a subscription as they go out: their kind and what is no secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "SCREAMING_SNAKE_CASE")]
pub enum AuthOut {
    /// None.
    None,
    /// `Authorization: Basic`.
    BasicAuth {
        /// Who the server says it is.
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

impl AuthIn {
    /// What may be shown of it.
    pub fn public(&self) -> AuthOut {
        match self {
            Self::None {} => AuthOut::None,
            Self::BasicAuth { username, .. } => AuthOut::BasicAuth { username: username.clone() },
            Self::HeaderToken { .. } => AuthOut::HeaderToken,
            Self::JwtHeader { .. } => AuthOut::JwtHeader,
        }
    }

    /// Whether its secret is left to what was stored before.
    pub fn keeps_secret(&self) -> bool {
        match self {
            Self::None {} => false,
            Self::BasicAuth { password: secret, .. }
            | Self::HeaderToken { token: secret }
            | Self::JwtHeader { token: secret } => secret.is_none(),
        }
    }

    /// Adds what no request could carry.
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

use bytes::Bytes;
use posthaste_api::{AuthIn, FieldError, Headers, MASK};
use serde::{Deserialize, Serialize};

use crate::secrets::{Sealer, SecretError};

/// All secrets of a subscription. They are sealed together, in the database and on the bus.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credentials {
    pub(crate) auth: AuthIn,
    /// The whole URL, if it has a query string.
    pub(crate) endpoint: Option<String>,
    pub(crate) headers: Vec<(String, String)>,
}

impl Credentials {
    pub(crate) fn new(auth: AuthIn, endpoint: &str, headers: Vec<(String, String)>) -> Self {
        Self { auth, endpoint: endpoint.contains('?').then(|| endpoint.to_owned()), headers }
    }

    /// Seals the credentials for this subscription: they cannot be opened for another one. Returns empty bytes if there
    /// are no secrets.
    pub(crate) fn seal(&self, sealer: &Sealer, subscription_id: &str) -> Result<Bytes, SecretError> {
        if *self == Self::default() {
            return Ok(Bytes::new());
        }
        let text = serde_json::to_vec(self).map_err(|_| SecretError::Damaged)?;
        Ok(sealer.seal(subscription_id, &text)?.into())
    }

    pub(crate) fn open(sealer: &Sealer, subscription_id: &str, sealed: &[u8]) -> Result<Self, SecretError> {
        if sealed.is_empty() {
            return Ok(Self::default());
        }
        let opened = sealer.open_sealed(subscription_id, sealed)?;
        serde_json::from_slice(&opened).map_err(|_| SecretError::Damaged)
    }
}

impl Default for Credentials {
    /// No credentials.
    fn default() -> Self {
        Self { auth: AuthIn::None {}, endpoint: None, headers: Vec::new() }
    }
}

/// The new credentials, with the old secret if no new one is given.
pub(crate) fn with_old_secret(new: AuthIn, old: &AuthIn) -> Result<AuthIn, FieldError> {
    if !new.keeps_secret() {
        return Ok(new);
    }
    match (new, old) {
        (AuthIn::BasicAuth { username, .. }, AuthIn::BasicAuth { password, .. }) => {
            Ok(AuthIn::BasicAuth { username, password: password.clone() })
        }
        (AuthIn::HeaderToken { .. }, AuthIn::HeaderToken { token } | AuthIn::JwtHeader { token }) => {
            Ok(AuthIn::HeaderToken { token: token.clone() })
        }
        (AuthIn::JwtHeader { .. }, AuthIn::HeaderToken { token } | AuthIn::JwtHeader { token }) => {
            Ok(AuthIn::JwtHeader { token: token.clone() })
        }
        // Every type by name, so that a new type does not compile before it has a rule above.
        (AuthIn::None {} | AuthIn::BasicAuth { .. } | AuthIn::HeaderToken { .. } | AuthIn::JwtHeader { .. }, _) => {
            Err(FieldError::new("auth", "has another type than before: give its secret, too"))
        }
    }
}

/// The new headers. A masked value, as responses show it, is replaced by the old value.
pub(crate) fn with_old_values(new: Headers, old: &[(String, String)]) -> Result<Vec<(String, String)>, FieldError> {
    let mut old: Vec<&(String, String)> = old.iter().collect();
    let value = |(name, value): (String, String)| {
        if value != MASK {
            return Ok((name, value));
        }
        // A name may occur twice, so each old value is used once.
        match old.iter().position(|(old_name, _)| old_name.eq_ignore_ascii_case(&name)) {
            Some(index) => Ok((name, old.remove(index).1.clone())),
            None => {
                let why = format!("is {MASK}, and no value is stored for this header: give the value");
                Err(FieldError::new(format!("headers.{name}"), why))
            }
        }
    };
    new.0.into_iter().map(value).collect()
}

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::header::HeaderValue;

/// How a request authenticates its sender. Debug output shows the kind, never a secret.
///
/// To add an auth type, begin with `AuthIn` and `AuthOut` in `posthaste-api/src/auth.rs`. This type only says what a
/// request contains, and several auth types may use the same form.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Auth {
    /// No authentication.
    #[default]
    None,
    /// `Authorization: Basic`, as RFC 7617 writes it in UTF-8.
    Basic {
        /// May not contain a colon, which separates it from the password.
        username: String,
        /// May be empty.
        password: String,
    },
    /// `Authorization: Bearer` with a shared token.
    Bearer {
        /// Sent as it is.
        token: String,
    },
}

/// Why credentials cannot be written into a request. No message repeats them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuthError {
    /// RFC 7617 ends the username at the first colon.
    #[error("the username contains a colon, which HTTP Basic cannot carry")]
    ColonInUsername,
    /// RFC 7617 refuses control characters in both parts.
    #[error("the {0} contains a control character")]
    ControlCharacter(&'static str),
    /// A bearer token without characters.
    #[error("the token is empty")]
    EmptyToken,
    /// A bearer token that is not visible ASCII.
    #[error("the token contains a space or a character outside ASCII")]
    BadToken,
}

impl Auth {
    /// Checks the credentials when they are saved: bad ones would make every request unbuildable.
    pub fn check(&self) -> Result<(), AuthError> {
        match self {
            Self::None => Ok(()),
            Self::Basic { username, .. } if username.contains(':') => Err(AuthError::ColonInUsername),
            Self::Basic { username, .. } if username.contains(char::is_control) => {
                Err(AuthError::ControlCharacter("username"))
            }
            Self::Basic { password, .. } if password.contains(char::is_control) => {
                Err(AuthError::ControlCharacter("password"))
            }
            Self::Basic { .. } => Ok(()),
            Self::Bearer { token } if token.is_empty() => Err(AuthError::EmptyToken),
            Self::Bearer { token } if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(()),
            Self::Bearer { .. } => Err(AuthError::BadToken),
        }
    }

    /// The value of the `Authorization` header.
    pub(crate) fn header_value(&self) -> Result<Option<HeaderValue>, AuthError> {
        self.check()?;
        let text = match self {
            Self::None => return Ok(None),
            Self::Basic { username, password } => format!("Basic {}", basic_credentials(username, password)),
            Self::Bearer { token } => format!("Bearer {token}"),
        };
        let mut value = HeaderValue::try_from(text).map_err(|_| AuthError::BadToken)?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// Every text that would reveal the credentials.
    pub(crate) fn secrets(&self) -> Vec<String> {
        match self {
            Self::None => Vec::new(),
            Self::Basic { username, password } => vec![basic_credentials(username, password), password.clone()],
            Self::Bearer { token } => vec![token.clone()],
        }
    }
}

fn basic_credentials(username: &str, password: &str) -> String {
    STANDARD.encode(format!("{username}:{password}"))
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Basic { username, .. } => f.debug_struct("Basic").field("username", username).finish_non_exhaustive(),
            Self::Bearer { .. } => f.debug_struct("Bearer").finish_non_exhaustive(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(username: &str, password: &str) -> Auth {
        Auth::Basic { username: username.into(), password: password.into() }
    }

    fn bearer(token: &str) -> Auth {
        Auth::Bearer { token: token.into() }
    }

    #[test]
    fn basic_follows_the_examples_of_rfc_7617() {
        let value = basic("Aladdin", "open sesame").header_value().unwrap().unwrap();
        assert_eq!(value, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        let value = basic("test", "123£").header_value().unwrap().unwrap();
        assert_eq!(value, "Basic dGVzdDoxMjPCow==");
    }

    #[test]
    fn credentials_that_cannot_be_sent_are_refused() {
        assert_eq!(basic("a:b", "c").check(), Err(AuthError::ColonInUsername));
        assert_eq!(basic("a\n", "c").check(), Err(AuthError::ControlCharacter("username")));
        assert_eq!(basic("a", "c\r\n").check(), Err(AuthError::ControlCharacter("password")));
        assert_eq!(basic("a", "b:c").check(), Ok(()));
        assert_eq!(bearer("").check(), Err(AuthError::EmptyToken));
        assert_eq!(bearer("a b").check(), Err(AuthError::BadToken));
        assert_eq!(bearer("a\r\nx: y").check(), Err(AuthError::BadToken));
        assert_eq!(bearer("abc.def-ghi_~+/==").check(), Ok(()));
    }

    #[test]
    fn debug_shows_no_secret() {
        assert_eq!(format!("{:?}", basic("user", "s3cret")), "Basic { username: \"user\", .. }");
        assert_eq!(format!("{:?}", bearer("s3cret")), "Bearer { .. }");
        assert!(!format!("{:?}", bearer("s3cret").header_value()).contains("s3cret"));
    }
}

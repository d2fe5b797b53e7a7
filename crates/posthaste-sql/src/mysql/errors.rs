use posthaste_core::{FaultKind, StoreError};
use sqlx::mysql::MySqlDatabaseError;

use crate::server_errors::server_errors;

/// Classes of SQLSTATE whose cause is not the statement itself: connection, transaction (deadlock).
const TRANSIENT: [&str; 2] = ["08", "40"];
/// Most of these errors have no class of their own. Resources are exhausted: disk, memory, connections. A lock was not
/// granted in time, or the row has changed since. An operator or a time limit ended the statement. The server is a
/// replica at the moment, or not yet a member of its cluster.
const ALSO_TRANSIENT: [u16; 22] = [
    1021, 1037, 1038, 1040, 1041, 1135, 1203, 1226, 1205, 1020, 1053, 1317, 1927, 1969, 3024, 4031, 1047, 1290, 1792,
    1836, 3100, 3101,
];
/// The server closed the connection, or does not know the outcome itself.
const UNANSWERED: [u16; 5] = [1053, 1180, 1317, 1927, 4031];

/// A text that its column cannot hold. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{column} has {length} characters, more than {longest}: give a shorter one")]
#[non_exhaustive]
pub struct TooLong {
    /// The column in question.
    pub column: &'static str,
    /// How many characters were given.
    pub length: usize,
    /// How many it can hold.
    pub longest: usize,
}

impl TooLong {
    /// Checked here and not by the server, because in some SQL modes the server truncates a text that is too long.
    pub(super) fn check(column: &'static str, text: &str, longest: usize) -> Result<(), Self> {
        // No text has more characters than bytes.
        let length = if text.len() <= longest { text.len() } else { text.chars().count() };
        match length <= longest {
            true => Ok(()),
            false => Err(Self { column, length, longest }),
        }
    }
}

server_errors!();

fn is_transient(error: &sqlx::Error) -> bool {
    has_class(error, &TRANSIENT) || number(error).is_some_and(|number| ALSO_TRANSIENT.contains(&number))
}

fn is_answered(error: &sqlx::Error) -> bool {
    !has_class(error, &["08"]) && number(error).is_none_or(|number| !UNANSWERED.contains(&number))
}

/// True if the SQLSTATE of the error belongs to one of these classes.
fn has_class(error: &sqlx::Error, classes: &[&str]) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| classes.iter().any(|class| code.starts_with(class)))
}

/// True if the statement gave up because another transaction has locked a row.
pub(super) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    number(error) == Some(1205)
}

/// The number of an error of the server.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}

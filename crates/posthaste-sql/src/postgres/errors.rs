use posthaste_core::{FaultKind, StoreError};

use crate::server_errors::server_errors;

/// Classes of SQLSTATE whose cause is not the statement itself: connection, transaction (deadlock), resources, operator
/// (shutdown, cancelled), system.
const TRANSIENT: [&str; 5] = ["08", "40", "53", "57", "58"];
/// A lock timeout; the server is a standby now; the server ended an idle transaction.
const ALSO_TRANSIENT: [&str; 3] = ["55P03", "25006", "25P03"];

server_errors!();

fn is_transient(error: &sqlx::Error) -> bool {
    code(error).is_some_and(|code| {
        TRANSIENT.iter().any(|class| code.starts_with(class)) || ALSO_TRANSIENT.contains(&code.as_str())
    })
}

/// False if the server closed the connection, or does not know the outcome of a commit itself.
fn is_answered(error: &sqlx::Error) -> bool {
    let is_unknown = |code: String| code.starts_with("08") || code.starts_with("57") || code == "40003";
    !code(error).is_some_and(is_unknown)
}

/// True if the statement gave up because another transaction has locked a row.
pub(super) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    code(error).is_some_and(|code| code == "55P03")
}

/// True if another transaction has a lock that the statement needs: it gave up, or it was chosen to end a deadlock.
pub(super) fn is_lock_conflict(error: &sqlx::Error) -> bool {
    is_lock_timeout(error) || code(error).is_some_and(|code| code == "40P01")
}

/// The SQLSTATE of an error of the server.
fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(|code| code.into_owned())
}

use crate::check::ChecksFailed;
use crate::client::ClientError;
use crate::config::ConfigError;
use crate::embedded::StartError;
use crate::output::PrintError;

/// How the process ends when it does not end well. The numbers are documented: scripts rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command was understood and did not succeed.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The server, or something that the server needs, cannot be reached.
    Unreachable = 3,
    /// There is nothing with this id.
    NotFound = 4,
}

/// A command line that no rule of the parser could refuse.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Something that was named on the command line and is not there.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotFound(pub String);

/// `None` when there is nothing to complain about: whoever read our output has seen enough of it.
pub fn exit_of(error: &anyhow::Error) -> Option<Exit> {
    for cause in error.chain() {
        if cause.is::<ConfigError>() || cause.is::<UsageError>() {
            return Some(Exit::Usage);
        } else if cause.is::<NotFound>() {
            return Some(Exit::NotFound);
        } else if let Some(error) = cause.downcast_ref::<ClientError>() {
            return Some(error.exit());
        } else if let Some(error) = cause.downcast_ref::<StartError>() {
            return Some(error.exit());
        } else if let Some(failed) = cause.downcast_ref::<ChecksFailed>() {
            return Some(failed.exit);
        } else if cause.downcast_ref::<PrintError>().is_some_and(PrintError::is_forgiven) {
            return None;
        }
    }
    Some(Exit::Failed)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn the_cause_decides_however_deep_it_lies() {
        let usage = Err::<(), _>(UsageError("no".to_owned())).context("outer").unwrap_err();
        assert_eq!(exit_of(&usage), Some(Exit::Usage));
        assert_eq!(exit_of(&anyhow::anyhow!("anything")), Some(Exit::Failed));
    }
}

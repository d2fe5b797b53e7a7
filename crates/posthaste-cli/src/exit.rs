use crate::check::ChecksFailed;
use crate::client::ClientError;
use crate::config::ConfigError;
use crate::embedded::StartError;
use crate::output::PrintError;
use crate::sources::SourcesUnreadable;

/// The exit code of a process that fails. The numbers are documented, because scripts rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command was understood and did not succeed.
    Failed = 1,
    /// The command line or the configuration is wrong.
    Usage = 2,
    /// The server, or something that the server needs, cannot be reached.
    Unreachable = 3,
    /// Nothing has this id.
    NotFound = 4,
}

/// The command line is wrong in a way that the argument parser cannot check.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// The command line names something that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotFound(pub String);

/// The exit code for an error: `None` for a closed pipe, as with `head`, which is no failure.
pub fn exit_of(error: &anyhow::Error) -> Option<Exit> {
    for cause in error.chain() {
        if cause.is::<ConfigError>() || cause.is::<UsageError>() {
            return Some(Exit::Usage);
        } else if cause.is::<SourcesUnreadable>() {
            return Some(Exit::Unreachable);
        } else if cause.is::<NotFound>() {
            return Some(Exit::NotFound);
        } else if let Some(error) = cause.downcast_ref::<ClientError>() {
            return Some(error.exit());
        } else if let Some(error) = cause.downcast_ref::<StartError>() {
            return Some(error.exit());
        } else if let Some(failed) = cause.downcast_ref::<ChecksFailed>() {
            return Some(failed.exit);
        } else if cause.downcast_ref::<PrintError>().is_some_and(PrintError::is_closed_pipe) {
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
    fn the_cause_decides_the_exit_code_at_any_depth() {
        let usage = Err::<(), _>(UsageError("no".to_owned())).context("outer").unwrap_err();
        assert_eq!(exit_of(&usage), Some(Exit::Usage));
        assert_eq!(exit_of(&anyhow::anyhow!("anything")), Some(Exit::Failed));
    }
}

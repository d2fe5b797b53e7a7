use posthaste_core::StoreError;

use super::{MAX_SUBJECT, VersionNumber};
use crate::compatibility::{Finding, Level, UnknownLevel};
use crate::registry::RegistryError;
use crate::schema::SchemaError;

/// Why the built-in registry did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuiltinError {
    /// There is no such subject.
    #[error("there is no subject {0:?}")]
    SubjectNotFound(String),
    /// There is no such version.
    #[error("the subject has no version {}", shown(*.0))]
    VersionNotFound(VersionNumber),
    /// There is no such schema.
    #[error("there is no such schema")]
    SchemaNotFound,
    /// All versions of the subject are deleted.
    #[error("subject {0:?} is deleted already: use permanent=true to remove it for good")]
    SubjectDeleted(String),
    /// A subject must be deleted before it is purged.
    #[error("subject {0:?} has versions in use: delete it without permanent=true first")]
    SubjectNotDeleted(String),
    /// The version is deleted.
    #[error("version {0} is deleted already: use permanent=true to remove it for good")]
    VersionDeleted(i32),
    /// A version must be deleted before it is purged.
    #[error("version {0} is in use: delete it without permanent=true first")]
    VersionNotDeleted(i32),
    /// The subject has no compatibility level of its own.
    #[error("subject {0:?} has no compatibility level of its own: use defaultToGlobal=true to see the global one")]
    NoLevel(String),
    /// The schema cannot be used.
    #[error(transparent)]
    InvalidSchema(#[from] SchemaError),
    /// A reference leads nowhere.
    #[error("the schema has a reference to something that does not exist: {0}")]
    UnknownReference(String),
    /// The text is no version.
    #[error("{0:?} is not a version: use a number from 1, or latest")]
    InvalidVersion(String),
    /// The text is no compatibility level.
    #[error(transparent)]
    InvalidLevel(#[from] UnknownLevel),
    /// The name of a subject is empty, too long or contains control characters.
    #[error("the name of a subject has 1 to {MAX_SUBJECT} characters and no control characters")]
    InvalidSubject,
    /// Another schema refers to the version.
    #[error("version {version} of subject {subject} is referenced by schema {by}: delete that one first")]
    Referenced {
        /// The subject.
        subject: String,
        /// The version.
        version: i32,
        /// The id of the schema that refers to it.
        by: i32,
    },
    /// There are too many subjects or versions.
    #[error("nothing more can be registered: {0}; delete what is not needed, permanently")]
    Full(String),
    /// The schema is not compatible with earlier versions.
    #[error("the schema is not compatible with earlier versions of subject {subject} ({level}): {}", listed(findings))]
    Incompatible {
        /// The subject.
        subject: String,
        /// The level of the subject.
        level: Level,
        /// What is not compatible.
        findings: Vec<Finding>,
    },
    /// Other changes always came first.
    #[error("too many changes at once: repeat the request")]
    Busy,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<BuiltinError> for RegistryError {
    fn from(error: BuiltinError) -> Self {
        match error {
            BuiltinError::Incompatible { findings, .. } => Self::Incompatible { reason: listed(&findings) },
            BuiltinError::Store(error) => Self::unavailable(error.chain()),
            BuiltinError::Busy => Self::unavailable(error.to_string()),
            error => Self::Refused { reason: error.to_string() },
        }
    }
}

fn listed(findings: &[Finding]) -> String {
    /// There may be thousands.
    const LISTED: usize = 20;
    let mut texts: Vec<String> = findings.iter().take(LISTED).map(ToString::to_string).collect();
    if findings.len() > LISTED {
        texts.push(format!("and {} more", findings.len() - LISTED));
    }
    texts.join("; ")
}

fn shown(number: VersionNumber) -> String {
    match number {
        VersionNumber::Latest => "latest".to_owned(),
        VersionNumber::Number(number) => number.to_string(),
    }
}

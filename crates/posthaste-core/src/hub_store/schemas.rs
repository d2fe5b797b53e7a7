use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::StoreError;

/// The tables of the built-in Schema Registry: schemas with ids, the versions of subjects, and compatibility levels.
///
/// The store knows nothing about schemas: the service in `posthaste-schema` decides what may be registered. It reads the
/// revision first and everything that it bases its decision on after that. Then it applies the change to that revision.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`).
///
/// - `a_schema_has_one_id_in_all_subjects`: two schemas with the same digest are the same schema. An id is never given
///   to another schema, not even after its last version is purged.
/// - `versions_are_numbered_from_one_and_never_reused`: as long as any version of the subject exists, deleted or not.
/// - `a_change_to_an_old_revision_is_refused`: every change raises the revision in its own transaction, and a change to
///   another revision than the current one changes nothing.
/// - `processes_that_register_at_once_agree`: on one id and one version.
/// - `a_deleted_version_exists_until_it_is_purged`.
/// - `levels_are_kept_for_each_subject`.
/// - `references_are_found_by_the_version_they_refer_to`: as long as a version that is not deleted has the reference.
#[async_trait]
pub trait SchemaStore: Send + Sync + 'static {
    /// The revision, which rises with every change.
    async fn revision(&self) -> Result<i64, StoreError>;

    /// The schema with this id.
    async fn schema(&self, id: i32) -> Result<Option<SchemaText>, StoreError>;

    /// All subjects that have a version, sorted by name.
    async fn subjects(&self) -> Result<Vec<Subject>, StoreError>;

    /// All versions of a subject, oldest first.
    async fn versions(&self, subject: &str) -> Result<Vec<SubjectVersion>, StoreError>;

    /// All versions of all subjects that have this schema, sorted by subject and version.
    async fn versions_of_schema(&self, id: i32) -> Result<Vec<SubjectVersion>, StoreError>;

    /// The ids of the schemas that refer to this version of this subject and are in use.
    async fn referring_schemas(&self, subject: &str, version: i32) -> Result<Vec<i32>, StoreError>;

    /// The compatibility level of a subject, or the global one; `None` if it was never set.
    async fn level(&self, subject: Option<&str>) -> Result<Option<String>, StoreError>;

    /// Applies a change if the store is at this revision.
    async fn apply(&self, change: SchemaChange, revision: i64) -> Result<Applied, StoreError>;
}

/// A schema as its author wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchemaText {
    /// The text.
    pub text: String,
    /// The schemas that it imports.
    pub references: Vec<SchemaReference>,
}

/// An import of a schema that another subject has. The names of the fields are those of Confluent's REST API.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SchemaReference {
    /// The name in the `import` statement.
    pub name: String,
    /// The subject that has the imported schema.
    pub subject: String,
    /// The version of that subject.
    pub version: i32,
}

/// A name under which versions of a schema are registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Its name.
    pub name: String,
    /// True if all its versions are deleted and none is purged yet.
    pub is_deleted: bool,
}

/// One version of a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectVersion {
    /// The subject.
    pub subject: String,
    /// Its number, from 1.
    pub version: i32,
    /// The schema.
    pub schema_id: i32,
    /// The digest of the schema.
    pub digest: Bytes,
    /// True if it was deleted and not purged yet.
    pub is_deleted: bool,
}

/// A change of the tables of the registry.
#[derive(Clone, Debug)]
pub enum SchemaChange {
    /// Adds a version to a subject.
    Register {
        /// The subject.
        subject: String,
        /// The schema.
        schema: SchemaText,
        /// Identifies the schema. Equal schemas have equal digests.
        digest: Bytes,
    },
    /// Marks versions of a subject as deleted: one, or all.
    Delete {
        /// The subject.
        subject: String,
        /// The version; `None` for all.
        version: Option<i32>,
    },
    /// Removes deleted versions of a subject: one, or all.
    Purge {
        /// The subject.
        subject: String,
        /// The version; `None` for all.
        version: Option<i32>,
    },
    /// Sets or removes a compatibility level.
    SetLevel {
        /// The subject; `None` for the global level.
        subject: Option<String>,
        /// The level; `None` removes it.
        level: Option<String>,
    },
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// A version was added.
    Registered {
        /// The id of the schema.
        id: i32,
        /// The new version.
        version: i32,
    },
    /// The change was made.
    Changed,
    /// Another change came first. Nothing was changed: read again and decide again.
    Stale,
}

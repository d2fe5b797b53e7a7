mod error;

use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::hub_store::{Applied, SchemaChange, SchemaReference, SchemaStore, SchemaText, SubjectVersion};

use tokio::sync::Mutex;

pub use self::error::BuiltinError;
use crate::bounded_cache::BoundedCache;
use crate::compatibility::{Finding, Level};
use crate::registry::{RegistryError, SchemaRegistry, collect_imports};
use crate::schema::{Imports, ParsedSchema, SchemaError};

/// The longest name of a subject, in characters.
pub const MAX_SUBJECT: usize = 255;
/// How many subjects there may be, and how many versions each of them may have.
const MAX_SUBJECTS: usize = 10_000;
const MAX_VERSIONS: usize = 1_000;
/// How often a change is tried again because others came first.
const MAX_ROUNDS: usize = 100;

/// The built-in Schema Registry, with the behaviour of Confluent's. Its data is in the database of the hub.
///
/// A change is decided on what is committed: if another process changes the registry meanwhile, it is decided again.
pub struct BuiltinRegistry {
    store: Arc<dyn SchemaStore>,
    /// Held by the registration of this process that is being decided. Without it, each of a thousand registrations at
    /// once would be decided again after every other one.
    registering: Mutex<()>,
    parsed: BoundedCache<i32, Arc<ParsedSchema>>,
}

/// One version of a subject and its schema.
#[derive(Clone, Debug)]
pub struct RegisteredVersion {
    /// The subject.
    pub subject: String,
    /// The number of the version.
    pub version: i32,
    /// The id of the schema.
    pub id: i32,
    /// The schema.
    pub schema: Arc<ParsedSchema>,
}

/// Names a version of a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionNumber {
    /// The newest version that is not deleted.
    Latest,
    /// The version with this number.
    Number(i32),
}

impl std::str::FromStr for VersionNumber {
    type Err = BuiltinError;

    fn from_str(text: &str) -> Result<Self, BuiltinError> {
        match (text, text.parse()) {
            ("latest" | "-1", _) => Ok(Self::Latest),
            (_, Ok(number)) if number > 0 => Ok(Self::Number(number)),
            _ => Err(BuiltinError::InvalidVersion(text.chars().take(64).collect())),
        }
    }
}

impl BuiltinRegistry {
    /// The registry in this database.
    pub fn new(store: Arc<dyn SchemaStore>) -> Self {
        Self { store, registering: Mutex::default(), parsed: BoundedCache::default() }
    }

    /// Registers a schema as the newest version of a subject, unless the subject has it already. Returns its id.
    pub async fn register_version(&self, subject: &str, schema: &SchemaText) -> Result<i32, BuiltinError> {
        check_subject(subject)?;
        let new = self.parse(schema).await?;
        if let Some(id) = id_of(&self.store.versions(subject).await?, &new) {
            return Ok(id);
        }
        let _registering = self.registering.lock().await;
        for _ in 0..MAX_ROUNDS {
            let revision = self.store.revision().await?;
            let versions = self.store.versions(subject).await?;
            if let Some(id) = id_of(&versions, &new) {
                return Ok(id);
            }
            let live: Vec<&SubjectVersion> = versions.iter().filter(|version| !version.is_deleted).collect();
            if versions.len() >= MAX_VERSIONS {
                return Err(BuiltinError::Full(format!("subject {subject} has {MAX_VERSIONS} versions")));
            }
            if versions.is_empty() && self.store.subjects().await?.len() >= MAX_SUBJECTS {
                return Err(BuiltinError::Full(format!("there are {MAX_SUBJECTS} subjects")));
            }
            let level = self.level_of(subject).await?;
            let findings = self.findings(level, &new, &live).await?;
            if !findings.is_empty() {
                return Err(BuiltinError::Incompatible { subject: subject.to_owned(), level, findings });
            }
            let (schema, digest) = (new.text().clone(), new.digest().clone());
            let change = SchemaChange::Register { subject: subject.to_owned(), schema, digest };
            if let Applied::Registered { id, .. } = self.store.apply(change, revision).await? {
                return Ok(id);
            }
        }
        Err(BuiltinError::Busy)
    }

    /// The version of a subject that has this schema.
    pub async fn look_up(
        &self,
        subject: &str,
        schema: &SchemaText,
        with_deleted: bool,
    ) -> Result<RegisteredVersion, BuiltinError> {
        let new = self.parse(schema).await?;
        let versions = self.versions_of(subject, with_deleted).await?;
        match versions.into_iter().rev().find(|version| version.digest == new.digest()) {
            Some(found) => self.load(found).await,
            None => Err(BuiltinError::SchemaNotFound),
        }
    }

    /// The names of all subjects.
    pub async fn subjects(&self, with_deleted: bool) -> Result<Vec<String>, BuiltinError> {
        let subjects = self.store.subjects().await?.into_iter();
        Ok(subjects.filter(|subject| with_deleted || !subject.is_deleted).map(|subject| subject.name).collect())
    }

    /// The numbers of the versions of a subject.
    pub async fn versions(&self, subject: &str, with_deleted: bool) -> Result<Vec<i32>, BuiltinError> {
        let versions = self.versions_of(subject, with_deleted).await?;
        Ok(versions.iter().map(|version| version.version).collect())
    }

    /// One version of a subject.
    pub async fn version(
        &self,
        subject: &str,
        number: VersionNumber,
        with_deleted: bool,
    ) -> Result<RegisteredVersion, BuiltinError> {
        let versions = self.versions_of(subject, with_deleted).await?;
        self.load(find(versions, number)?).await
    }

    /// The schema with this id.
    pub async fn schema_of_id(&self, id: i32) -> Result<Arc<ParsedSchema>, BuiltinError> {
        if let Some(schema) = self.parsed.with(&id, Arc::clone) {
            return Ok(schema);
        }
        let text = self.store.schema(id).await?.ok_or(BuiltinError::SchemaNotFound)?;
        let schema = self.parse(&text).await?;
        self.parsed.insert(id, schema.clone(), text.text.len());
        Ok(schema)
    }

    /// The versions of all subjects that have the schema with this id.
    pub async fn versions_of_id(&self, id: i32, with_deleted: bool) -> Result<Vec<SubjectVersion>, BuiltinError> {
        if self.store.schema(id).await?.is_none() {
            return Err(BuiltinError::SchemaNotFound);
        }
        let versions = self.store.versions_of_schema(id).await?.into_iter();
        Ok(versions.filter(|version| with_deleted || !version.is_deleted).collect())
    }

    /// The ids of the schemas that refer to a version.
    pub async fn referring_schemas(&self, subject: &str, number: VersionNumber) -> Result<Vec<i32>, BuiltinError> {
        let version = find(self.versions_of(subject, false).await?, number)?;
        Ok(self.store.referring_schemas(subject, version.version).await?)
    }

    /// Deletes all versions of a subject, or purges them if they are deleted. Returns their numbers.
    pub async fn delete_subject(&self, subject: &str, permanent: bool) -> Result<Vec<i32>, BuiltinError> {
        for _ in 0..MAX_ROUNDS {
            let revision = self.store.revision().await?;
            let versions = self.versions_of(subject, true).await?;
            let is_deleted = versions.iter().all(|version| version.is_deleted);
            if permanent != is_deleted {
                return Err(match permanent {
                    true => BuiltinError::SubjectNotDeleted(subject.to_owned()),
                    false => BuiltinError::SubjectDeleted(subject.to_owned()),
                });
            }
            let versions: Vec<_> = versions.into_iter().filter(|version| version.is_deleted == permanent).collect();
            for version in &versions {
                self.check_unreferenced(subject, version.version).await?;
            }
            let subject = subject.to_owned();
            let change = match permanent {
                true => SchemaChange::Purge { subject, version: None },
                false => SchemaChange::Delete { subject, version: None },
            };
            if self.store.apply(change, revision).await? == Applied::Changed {
                return Ok(versions.iter().map(|version| version.version).collect());
            }
        }
        Err(BuiltinError::Busy)
    }

    /// Deletes one version of a subject, or purges it if it is deleted. Returns its number.
    pub async fn delete_version(
        &self,
        subject: &str,
        number: VersionNumber,
        permanent: bool,
    ) -> Result<i32, BuiltinError> {
        for _ in 0..MAX_ROUNDS {
            let revision = self.store.revision().await?;
            let found = find(self.versions_of(subject, true).await?, number)?;
            let version = found.version;
            if permanent != found.is_deleted {
                return Err(match permanent {
                    true => BuiltinError::VersionNotDeleted(version),
                    false => BuiltinError::VersionDeleted(version),
                });
            }
            self.check_unreferenced(subject, version).await?;
            let subject = subject.to_owned();
            let change = match permanent {
                true => SchemaChange::Purge { subject, version: Some(version) },
                false => SchemaChange::Delete { subject, version: Some(version) },
            };
            if self.store.apply(change, revision).await? == Applied::Changed {
                return Ok(version);
            }
        }
        Err(BuiltinError::Busy)
    }

    /// The global level.
    pub async fn global_level(&self) -> Result<Level, BuiltinError> {
        Ok(known_level(self.store.level(None).await?).unwrap_or_default())
    }

    /// The level of a subject; `None` if it has none of its own.
    pub async fn subject_level(&self, subject: &str) -> Result<Option<Level>, BuiltinError> {
        Ok(known_level(self.store.level(Some(subject)).await?))
    }

    /// Sets the level of a subject, or the global one; `None` removes it.
    pub async fn set_level(&self, subject: Option<&str>, level: Option<Level>) -> Result<(), BuiltinError> {
        subject.map_or(Ok(()), check_subject)?;
        for _ in 0..MAX_ROUNDS {
            let revision = self.store.revision().await?;
            let (subject, level) = (subject.map(str::to_owned), level.map(|level| level.as_str().to_owned()));
            if self.store.apply(SchemaChange::SetLevel { subject, level }, revision).await? == Applied::Changed {
                return Ok(());
            }
        }
        Err(BuiltinError::Busy)
    }

    /// What keeps a schema from following one version of a subject. A subject without a version accepts any schema.
    pub async fn test_compatibility(
        &self,
        subject: &str,
        number: VersionNumber,
        schema: &SchemaText,
    ) -> Result<Vec<Finding>, BuiltinError> {
        let new = self.parse(schema).await?;
        let found = match (self.versions_of(subject, false).await, number) {
            (Ok(versions), _) => find(versions, number)?,
            (Err(BuiltinError::SubjectNotFound(_)), VersionNumber::Latest) => return Ok(Vec::new()),
            (Err(error), _) => return Err(error),
        };
        self.findings(self.level_of(subject).await?, &new, &[&found]).await
    }

    async fn level_of(&self, subject: &str) -> Result<Level, BuiltinError> {
        match self.subject_level(subject).await? {
            Some(level) => Ok(level),
            None => self.global_level().await,
        }
    }

    async fn versions_of(&self, subject: &str, with_deleted: bool) -> Result<Vec<SubjectVersion>, BuiltinError> {
        check_subject(subject)?;
        let mut versions = self.store.versions(subject).await?;
        versions.retain(|version| with_deleted || !version.is_deleted);
        match versions.is_empty() {
            true => Err(BuiltinError::SubjectNotFound(subject.to_owned())),
            false => Ok(versions),
        }
    }

    async fn load(&self, found: SubjectVersion) -> Result<RegisteredVersion, BuiltinError> {
        let schema = self.schema_of_id(found.schema_id).await?;
        Ok(RegisteredVersion { subject: found.subject, version: found.version, id: found.schema_id, schema })
    }

    async fn check_unreferenced(&self, subject: &str, version: i32) -> Result<(), BuiltinError> {
        match &self.store.referring_schemas(subject, version).await?[..] {
            [] => Ok(()),
            [id, ..] => Err(BuiltinError::Referenced { subject: subject.to_owned(), version, by: *id }),
        }
    }

    async fn findings(
        &self,
        level: Level,
        new: &Arc<ParsedSchema>,
        earlier: &[&SubjectVersion],
    ) -> Result<Vec<Finding>, BuiltinError> {
        let counted = if level.is_transitive() { earlier } else { &earlier[earlier.len().saturating_sub(1)..] };
        let mut schemas = Vec::with_capacity(counted.len());
        for version in counted.iter().filter(|_| level != Level::None) {
            schemas.push(self.schema_of_id(version.schema_id).await?);
        }
        let new = new.clone();
        off_the_runtime(move || Ok(level.check(&new, schemas.iter().map(Arc::as_ref)))).await
    }

    async fn parse(&self, schema: &SchemaText) -> Result<Arc<ParsedSchema>, BuiltinError> {
        if schema.text.contains('\0') || schema.references.iter().any(|reference| reference.name.contains('\0')) {
            let problem = "it contains the character U+0000".to_owned();
            return Err(SchemaError::Invalid { problem }.into());
        }
        let store = self.store.clone();
        let imports = collect_imports(&schema.references, |reference| {
            let store = store.clone();
            Box::pin(async move { referenced(&*store, reference).await })
        });
        let (imports, schema): (Imports, _) = (imports.await?, schema.clone());
        off_the_runtime(move || Ok(Arc::new(ParsedSchema::parse(schema, &imports)?))).await
    }
}

#[async_trait]
impl SchemaRegistry for BuiltinRegistry {
    async fn register(&self, subject: &str, schema: &SchemaText) -> Result<i32, RegistryError> {
        Ok(self.register_version(subject, schema).await?)
    }

    async fn schema(&self, id: i32) -> Result<Option<Arc<ParsedSchema>>, RegistryError> {
        match self.schema_of_id(id).await {
            Ok(schema) => Ok(Some(schema)),
            Err(BuiltinError::SchemaNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn set_compatibility(&self, subject: &str, level: Level) -> Result<(), RegistryError> {
        if self.subject_level(subject).await? == Some(level) {
            return Ok(());
        }
        Ok(self.set_level(Some(subject), Some(level)).await?)
    }

    async fn check(&self) -> Result<(), RegistryError> {
        self.store.revision().await.map(|_| ()).map_err(|error| BuiltinError::from(error).into())
    }
}

/// Reads and compares schemas beside the tasks of the runtime, because large ones take a while.
async fn off_the_runtime<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BuiltinError> + Send + 'static,
) -> Result<T, BuiltinError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        let problem = "the parser cannot handle it".to_owned();
        Err(SchemaError::Invalid { problem }.into())
    })
}

async fn referenced(store: &dyn SchemaStore, reference: SchemaReference) -> Result<SchemaText, BuiltinError> {
    let versions = store.versions(&reference.subject).await?;
    let missing = || {
        let SchemaReference { name, subject, version } = &reference;
        BuiltinError::UnknownReference(format!("{name} refers to version {version} of subject {subject}"))
    };
    let version = versions.iter().find(|version| version.version == reference.version).ok_or_else(missing)?;
    store.schema(version.schema_id).await?.ok_or_else(missing)
}

fn find(versions: Vec<SubjectVersion>, number: VersionNumber) -> Result<SubjectVersion, BuiltinError> {
    let mut newest_first = versions.into_iter().rev();
    match number {
        VersionNumber::Latest => newest_first.find(|version| !version.is_deleted),
        VersionNumber::Number(number) => newest_first.find(|version| version.version == number),
    }
    .ok_or(BuiltinError::VersionNotFound(number))
}

/// The id of the newest version that has this schema and is not deleted.
fn id_of(versions: &[SubjectVersion], schema: &ParsedSchema) -> Option<i32> {
    let mut live = versions.iter().rev().filter(|version| !version.is_deleted);
    live.find(|version| version.digest == schema.digest()).map(|version| version.schema_id)
}

fn check_subject(subject: &str) -> Result<(), BuiltinError> {
    let length = subject.chars().count();
    match length == 0 || length > MAX_SUBJECT || subject.chars().any(char::is_control) {
        true => Err(BuiltinError::InvalidSubject),
        false => Ok(()),
    }
}

/// A level that another program wrote into the table may be none.
fn known_level(text: Option<String>) -> Option<Level> {
    text.and_then(|text| text.parse().ok())
}

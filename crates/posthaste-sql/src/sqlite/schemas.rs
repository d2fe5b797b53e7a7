use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Applied, SchemaChange, SchemaReference, SchemaStore, SchemaText, Subject, SubjectVersion,
};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::database::Database;
use super::errors::doing;

/// The tables of the built-in Schema Registry.
#[derive(Clone)]
pub struct SchemaTables {
    database: Database,
}

impl SchemaTables {
    /// The tables of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { database }
    }
}

#[async_trait]
impl SchemaStore for SchemaTables {
    async fn revision(&self) -> Result<i64, StoreError> {
        let query = sqlx::query_scalar("SELECT revision FROM schema_revision");
        doing("read the revision of the schemas", query.fetch_one(self.database.readers())).await
    }

    async fn schema(&self, id: i32) -> Result<Option<SchemaText>, StoreError> {
        const REFERENCES: &str =
            "SELECT name, subject, version FROM schema_reference WHERE schema_id = ? ORDER BY place";
        // A schema never changes, so two statements see the same.
        let read = async {
            let text = sqlx::query_scalar("SELECT text FROM schema_text WHERE id = ?").bind(id);
            let Some(text) = text.fetch_optional(self.database.readers()).await? else {
                return Ok(None);
            };
            let rows = sqlx::query(REFERENCES).bind(id).fetch_all(self.database.readers()).await?;
            let references = rows.iter().map(reference).collect::<Result<_, _>>()?;
            Ok(Some(SchemaText { text, references }))
        };
        doing("read a schema", read).await
    }

    async fn subjects(&self) -> Result<Vec<Subject>, StoreError> {
        const SUBJECTS: &str = "SELECT subject, min(deleted) FROM schema_version GROUP BY subject ORDER BY subject";
        let read = async {
            let rows = sqlx::query(SUBJECTS).fetch_all(self.database.operators()).await?;
            let subject = |row: &SqliteRow| Ok(Subject { name: row.try_get(0)?, is_deleted: row.try_get(1)? });
            rows.iter().map(subject).collect()
        };
        doing("list the subjects", read).await
    }

    async fn versions(&self, subject: &str) -> Result<Vec<SubjectVersion>, StoreError> {
        const VERSIONS: &str = "SELECT subject, version, schema_id, digest, deleted
             FROM schema_version JOIN schema_text ON id = schema_id WHERE subject = ? ORDER BY version";
        let rows = sqlx::query(VERSIONS).bind(subject).fetch_all(self.database.readers());
        doing("list the versions of a subject", async { rows.await?.iter().map(version).collect() }).await
    }

    async fn versions_of_schema(&self, id: i32) -> Result<Vec<SubjectVersion>, StoreError> {
        const VERSIONS: &str = "SELECT subject, version, schema_id, digest, deleted
             FROM schema_version JOIN schema_text ON id = schema_id WHERE schema_id = ? ORDER BY subject, version";
        let rows = sqlx::query(VERSIONS).bind(id).fetch_all(self.database.operators());
        doing("list the versions of a schema", async { rows.await?.iter().map(version).collect() }).await
    }

    async fn referring_schemas(&self, subject: &str, version: i32) -> Result<Vec<i32>, StoreError> {
        const REFERRING: &str = "SELECT DISTINCT schema_id FROM schema_reference
             WHERE subject = ? AND version = ? AND EXISTS (
                 SELECT 1 FROM schema_version
                 WHERE schema_version.schema_id = schema_reference.schema_id AND deleted = 0)
             ORDER BY schema_id";
        let query = sqlx::query_scalar(REFERRING).bind(subject).bind(version);
        doing("list the schemas that refer to a version", query.fetch_all(self.database.operators())).await
    }

    async fn level(&self, subject: Option<&str>) -> Result<Option<String>, StoreError> {
        let query = sqlx::query_scalar("SELECT level FROM schema_level WHERE subject = ?").bind(subject.unwrap_or(""));
        doing("read a compatibility level", query.fetch_optional(self.database.readers())).await
    }

    async fn apply(&self, change: SchemaChange, revision: i64) -> Result<Applied, StoreError> {
        let apply = self.database.write_with("change the schemas", (change, revision), |connection, arguments| {
            Box::pin(apply(connection, arguments))
        });
        apply.await
    }
}

async fn apply(connection: &mut SqliteConnection, arguments: Arc<(SchemaChange, i64)>) -> Result<Applied, sqlx::Error> {
    let (change, revision) = &*arguments;
    let raise = sqlx::query("UPDATE schema_revision SET revision = revision + 1 WHERE revision = ?").bind(revision);
    if raise.execute(&mut *connection).await?.rows_affected() == 0 {
        return Ok(Applied::Stale);
    }
    match change {
        SchemaChange::Register { subject, schema, digest } => {
            return register(connection, subject, schema, digest).await;
        }
        SchemaChange::Delete { subject, version } => {
            let delete = "UPDATE schema_version SET deleted = 1 WHERE subject = ?1 AND version = coalesce(?2, version)";
            sqlx::query(delete).bind(subject).bind(version).execute(connection).await?;
        }
        SchemaChange::Purge { subject, version } => {
            let purge = "DELETE FROM schema_version
                 WHERE subject = ?1 AND version = coalesce(?2, version) AND deleted = 1";
            sqlx::query(purge).bind(subject).bind(version).execute(connection).await?;
        }
        SchemaChange::SetLevel { subject, level } => {
            let subject = subject.as_deref().unwrap_or("");
            sqlx::query("DELETE FROM schema_level WHERE subject = ?").bind(subject).execute(&mut *connection).await?;
            if let Some(level) = level {
                let insert = sqlx::query("INSERT INTO schema_level (subject, level) VALUES (?, ?)");
                insert.bind(subject).bind(level).execute(connection).await?;
            }
        }
    }
    Ok(Applied::Changed)
}

async fn register(
    connection: &mut SqliteConnection,
    subject: &str,
    schema: &SchemaText,
    digest: &[u8],
) -> Result<Applied, sqlx::Error> {
    const ADD: &str = "INSERT INTO schema_version (subject, version, schema_id)
         SELECT ?1, coalesce(max(version), 0) + 1, ?2 FROM schema_version WHERE subject = ?1 RETURNING version";
    let known = sqlx::query_scalar("SELECT id FROM schema_text WHERE digest = ?").bind(digest);
    let id: i32 = match known.fetch_optional(&mut *connection).await? {
        Some(id) => id,
        None => insert(connection, schema, digest).await?,
    };
    let version = sqlx::query_scalar(ADD).bind(subject).bind(id).fetch_one(connection).await?;
    Ok(Applied::Registered { id, version })
}

async fn insert(connection: &mut SqliteConnection, schema: &SchemaText, digest: &[u8]) -> Result<i32, sqlx::Error> {
    const REFERENCE: &str =
        "INSERT INTO schema_reference (schema_id, place, name, subject, version) VALUES (?, ?, ?, ?, ?)";
    let insert = sqlx::query_scalar("INSERT INTO schema_text (digest, text) VALUES (?, ?) RETURNING id");
    let id: i32 = insert.bind(digest).bind(&schema.text).fetch_one(&mut *connection).await?;
    for (place, reference) in schema.references.iter().enumerate() {
        let insert = sqlx::query(REFERENCE).bind(id).bind(place as i64).bind(&reference.name);
        insert.bind(&reference.subject).bind(reference.version).execute(&mut *connection).await?;
    }
    Ok(id)
}

fn reference(row: &SqliteRow) -> Result<SchemaReference, sqlx::Error> {
    Ok(SchemaReference { name: row.try_get(0)?, subject: row.try_get(1)?, version: row.try_get(2)? })
}

fn version(row: &SqliteRow) -> Result<SubjectVersion, sqlx::Error> {
    Ok(SubjectVersion {
        subject: row.try_get(0)?,
        version: row.try_get(1)?,
        schema_id: row.try_get(2)?,
        digest: Bytes::from(row.try_get::<Vec<u8>, _>(3)?),
        is_deleted: row.try_get(4)?,
    })
}

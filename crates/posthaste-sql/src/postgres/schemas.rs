use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Applied, SchemaChange, SchemaReference, SchemaStore, SchemaText, Subject, SubjectVersion,
};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Execute, PgPool, Postgres, Row};

use super::log::{STATEMENT_TIMEOUT, limited};
use crate::session::{Failed, Session};

/// Begins a change. The locks of a host that vanishes are released after ten seconds.
const WRITE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
     SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '10s'";

/// The number of connections. Schemas are read once and changed rarely.
pub(super) const CONNECTIONS: u32 = 2;

/// The tables of the built-in Schema Registry on PostgreSQL. Many processes may use them.
#[derive(Clone)]
pub struct SchemaTables {
    session: Arc<Session<Postgres>>,
}

impl SchemaTables {
    /// The tables of a database whose hub tables are up to date, see [`migrate_hub`](super::migrate_hub). It opens
    /// connections of its own with the options of the pool.
    pub fn new(pool: &PgPool) -> Self {
        Self { session: Arc::new(Session::with_connections(pool, CONNECTIONS)) }
    }

    /// Runs one statement and reads its rows.
    async fn read<'q, T>(
        &self,
        what: &'static str,
        statement: impl Execute<'q, Postgres> + 'q,
        read: impl Fn(&PgRow) -> Result<T, sqlx::Error>,
    ) -> Result<Vec<T>, StoreError> {
        let rows = async {
            let rows = self.session.fetch(statement).await?;
            Ok(rows.iter().map(read).collect::<Result<_, _>>()?)
        };
        limited(what, STATEMENT_TIMEOUT, rows).await
    }
}

#[async_trait]
impl SchemaStore for SchemaTables {
    async fn revision(&self) -> Result<i64, StoreError> {
        let query = sqlx::query("SELECT revision FROM schema_revision");
        let found = self.read("read the revision of the schemas", query, |row| row.try_get(0)).await?;
        Ok(found.first().copied().unwrap_or_default())
    }

    async fn schema(&self, id: i32) -> Result<Option<SchemaText>, StoreError> {
        const DOING: &str = "read a schema";
        const REFERENCES: &str =
            "SELECT name, subject, version FROM schema_reference WHERE schema_id = $1 ORDER BY place";
        // A schema never changes, so two statements see the same.
        let query = sqlx::query("SELECT text FROM schema_text WHERE id = $1").bind(id);
        let Some(text) = self.read(DOING, query, |row| row.try_get(0)).await?.pop() else {
            return Ok(None);
        };
        let references = self.read(DOING, sqlx::query(REFERENCES).bind(id), reference).await?;
        Ok(Some(SchemaText { text, references }))
    }

    async fn subjects(&self) -> Result<Vec<Subject>, StoreError> {
        const SUBJECTS: &str =
            "SELECT subject, bool_and(deleted) FROM schema_version GROUP BY subject ORDER BY subject";
        let subject = |row: &PgRow| Ok(Subject { name: row.try_get(0)?, is_deleted: row.try_get(1)? });
        self.read("list the subjects", sqlx::query(SUBJECTS), subject).await
    }

    async fn versions(&self, subject: &str) -> Result<Vec<SubjectVersion>, StoreError> {
        const VERSIONS: &str = "SELECT subject, version, schema_id, digest, deleted
             FROM schema_version JOIN schema_text ON id = schema_id WHERE subject = $1 ORDER BY version";
        self.read("list the versions of a subject", sqlx::query(VERSIONS).bind(subject), version).await
    }

    async fn versions_of_schema(&self, id: i32) -> Result<Vec<SubjectVersion>, StoreError> {
        const VERSIONS: &str = "SELECT subject, version, schema_id, digest, deleted
             FROM schema_version JOIN schema_text ON id = schema_id WHERE schema_id = $1 ORDER BY subject, version";
        self.read("list the versions of a schema", sqlx::query(VERSIONS).bind(id), version).await
    }

    async fn referring_schemas(&self, subject: &str, version: i32) -> Result<Vec<i32>, StoreError> {
        const REFERRING: &str = "SELECT DISTINCT schema_id FROM schema_reference
             WHERE subject = $1 AND version = $2 AND EXISTS (
                 SELECT 1 FROM schema_version
                 WHERE schema_version.schema_id = schema_reference.schema_id AND NOT deleted)
             ORDER BY schema_id";
        let query = sqlx::query(REFERRING).bind(subject).bind(version);
        self.read("list the schemas that refer to a version", query, |row| row.try_get(0)).await
    }

    async fn level(&self, subject: Option<&str>) -> Result<Option<String>, StoreError> {
        let query = sqlx::query("SELECT level FROM schema_level WHERE subject = $1").bind(subject.unwrap_or(""));
        Ok(self.read("read a compatibility level", query, |row| row.try_get(0)).await?.pop())
    }

    async fn apply(&self, change: SchemaChange, revision: i64) -> Result<Applied, StoreError> {
        let work = async {
            let mut work = self.session.begin(WRITE).await?;
            let applied = apply(&mut work, &change, revision).await?;
            work.commit().await?;
            Ok::<_, Failed>(applied)
        };
        limited("change the schemas", STATEMENT_TIMEOUT, work).await
    }
}

async fn apply(connection: &mut PgConnection, change: &SchemaChange, revision: i64) -> Result<Applied, sqlx::Error> {
    let raise = sqlx::query("UPDATE schema_revision SET revision = revision + 1 WHERE revision = $1").bind(revision);
    if raise.execute(&mut *connection).await?.rows_affected() == 0 {
        return Ok(Applied::Stale);
    }
    match change {
        SchemaChange::Register { subject, schema, digest } => {
            return register(connection, subject, schema, digest).await;
        }
        SchemaChange::Delete { subject, version } => {
            let delete =
                "UPDATE schema_version SET deleted = true WHERE subject = $1 AND version = coalesce($2, version)";
            sqlx::query(delete).bind(subject).bind(version).execute(connection).await?;
        }
        SchemaChange::Purge { subject, version } => {
            let purge = "DELETE FROM schema_version WHERE subject = $1 AND version = coalesce($2, version) AND deleted";
            sqlx::query(purge).bind(subject).bind(version).execute(connection).await?;
        }
        SchemaChange::SetLevel { subject, level } => {
            let subject = subject.as_deref().unwrap_or("");
            sqlx::query("DELETE FROM schema_level WHERE subject = $1").bind(subject).execute(&mut *connection).await?;
            if let Some(level) = level {
                let insert = sqlx::query("INSERT INTO schema_level (subject, level) VALUES ($1, $2)");
                insert.bind(subject).bind(level).execute(connection).await?;
            }
        }
    }
    Ok(Applied::Changed)
}

async fn register(
    connection: &mut PgConnection,
    subject: &str,
    schema: &SchemaText,
    digest: &[u8],
) -> Result<Applied, sqlx::Error> {
    const ADD: &str = "INSERT INTO schema_version (subject, version, schema_id)
         SELECT $1, coalesce(max(version), 0) + 1, $2 FROM schema_version WHERE subject = $1 RETURNING version";
    let known = sqlx::query_scalar("SELECT id FROM schema_text WHERE digest = $1").bind(digest);
    let id: i32 = match known.fetch_optional(&mut *connection).await? {
        Some(id) => id,
        None => insert(connection, schema, digest).await?,
    };
    let version = sqlx::query_scalar(ADD).bind(subject).bind(id).fetch_one(connection).await?;
    Ok(Applied::Registered { id, version })
}

async fn insert(connection: &mut PgConnection, schema: &SchemaText, digest: &[u8]) -> Result<i32, sqlx::Error> {
    const REFERENCE: &str =
        "INSERT INTO schema_reference (schema_id, place, name, subject, version) VALUES ($1, $2, $3, $4, $5)";
    let insert = sqlx::query_scalar("INSERT INTO schema_text (digest, text) VALUES ($1, $2) RETURNING id");
    let id: i32 = insert.bind(digest).bind(&schema.text).fetch_one(&mut *connection).await?;
    for (place, reference) in schema.references.iter().enumerate() {
        let insert = sqlx::query(REFERENCE).bind(id).bind(place as i32).bind(&reference.name);
        insert.bind(&reference.subject).bind(reference.version).execute(&mut *connection).await?;
    }
    Ok(id)
}

fn reference(row: &PgRow) -> Result<SchemaReference, sqlx::Error> {
    Ok(SchemaReference { name: row.try_get(0)?, subject: row.try_get(1)?, version: row.try_get(2)? })
}

fn version(row: &PgRow) -> Result<SubjectVersion, sqlx::Error> {
    Ok(SubjectVersion {
        subject: row.try_get(0)?,
        version: row.try_get(1)?,
        schema_id: row.try_get(2)?,
        digest: Bytes::from(row.try_get::<Vec<u8>, _>(3)?),
        is_deleted: row.try_get(4)?,
    })
}

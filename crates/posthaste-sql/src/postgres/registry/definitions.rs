use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Definition, DefinitionFields, DefinitionStore, EventKey, Page, PageRequest, RegistryError,
};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgConnection, Postgres, QueryBuilder, Row};
use uuid::Uuid;

use super::{RegistryTables, check_version, page, raise_version};
use crate::postgres::errors::store_error;
use crate::postgres::texts::storable_text;

pub(super) const COLUMNS: &str = "event_definition.id, source_service, event_type, resource_type, operation_type, \
     description, event_definition.created_at, event_definition.updated_at, event_definition.version";
pub(super) const COLUMN_COUNT: usize = 9;

const VERSION_OF: &str = "SELECT version FROM event_definition WHERE id = $1";
const BY_KEY: &str = "source_service = $1 AND event_type = $2 AND resource_type = $3 AND operation_type = $4";

/// Binds: the key.
pub(super) fn of_key() -> String {
    format!("SELECT {COLUMNS} FROM event_definition WHERE {BY_KEY}")
}

#[async_trait]
impl DefinitionStore for RegistryTables {
    async fn create_definition(&self, fields: DefinitionFields) -> Result<Definition, RegistryError> {
        self.change("create a definition", |connection| Box::pin(async move { create(connection, &fields).await }))
            .await
    }

    async fn update_definition(
        &self,
        id: &str,
        fields: DefinitionFields,
        expected: Option<i64>,
    ) -> Result<Definition, RegistryError> {
        let id = id.to_owned();
        self.change("update a definition", |connection| {
            Box::pin(async move { update(connection, &id, &fields, expected).await })
        })
        .await
    }

    async fn delete_definition(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError> {
        let id = id.to_owned();
        self.change("delete a definition", |connection| {
            Box::pin(async move { delete(connection, &id, expected).await })
        })
        .await
    }

    async fn definition(&self, id: &str) -> Result<Option<Definition>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM event_definition WHERE id = $1");
        self.find("read a definition", sql, id, |row| read(row, 0)).await
    }

    async fn definition_of_key(&self, key: &EventKey) -> Result<Option<Definition>, StoreError> {
        const DOING: &str = "read a definition";
        let rows = self.database.read(DOING, bind_key(sqlx::query(AssertSqlSafe(of_key())), key)).await?;
        rows.first().map(|row| read(row, 0)).transpose().map_err(|error| store_error(DOING, error))
    }

    async fn definitions(&self, request: PageRequest) -> Result<Page<Definition>, StoreError> {
        let all = |query: &mut QueryBuilder<Postgres>| {
            query.push(" WHERE true");
        };
        let table = (COLUMNS, "event_definition");
        page(self, "list the definitions", table, request, all, |row| read(row, 0)).await
    }
}

type Bound<'q> = Query<'q, Postgres, PgArguments>;

fn bind_key<'q>(query: Bound<'q>, key: &EventKey) -> Bound<'q> {
    let query = query.bind(storable_text(&key.source_service)).bind(storable_text(&key.event_type));
    query.bind(storable_text(&key.resource_type)).bind(storable_text(&key.operation_type))
}

async fn create(
    connection: &mut PgConnection,
    fields: &DefinitionFields,
) -> Result<Result<Definition, RegistryError>, sqlx::Error> {
    if id_of(connection, &fields.key).await?.is_some() {
        return Ok(Err(RegistryError::Duplicate));
    }
    // The id is chosen while the registry is locked, so that ids of several processes rise in the order of creation.
    let id = Uuid::now_v7().to_string();
    let sql = format!(
        "INSERT INTO event_definition (source_service, event_type, resource_type, operation_type, description, id)
         VALUES ($1, $2, $3, $4, $5, $6) RETURNING {COLUMNS}"
    );
    write(connection, sql, &id, fields).await.map(Ok)
}

async fn update(
    connection: &mut PgConnection,
    id: &str,
    fields: &DefinitionFields,
    expected: Option<i64>,
) -> Result<Result<Definition, RegistryError>, sqlx::Error> {
    if let Err(refusal) = check_version(connection, VERSION_OF, id, expected).await? {
        return Ok(Err(refusal));
    }
    if id_of(connection, &fields.key).await?.is_some_and(|other| other != id) {
        return Ok(Err(RegistryError::Duplicate));
    }
    let sql = format!(
        "UPDATE event_definition SET source_service = $1, event_type = $2, resource_type = $3, operation_type = $4,
             description = $5, updated_at = clock_timestamp(), version = version + 1
         WHERE id = $6 RETURNING {COLUMNS}"
    );
    write(connection, sql, id, fields).await.map(Ok)
}

/// Both statements have the same binds, the id last.
async fn write(
    connection: &mut PgConnection,
    sql: String,
    id: &str,
    fields: &DefinitionFields,
) -> Result<Definition, sqlx::Error> {
    let query = bind_key(sqlx::query(AssertSqlSafe(sql)), &fields.key);
    let query = query.bind(fields.description.as_deref().map(storable_text)).bind(id);
    let written = read(&query.fetch_one(&mut *connection).await?, 0)?;
    raise_version(connection).await?;
    Ok(written)
}

async fn delete(
    connection: &mut PgConnection,
    id: &str,
    expected: Option<i64>,
) -> Result<Result<(), RegistryError>, sqlx::Error> {
    const USED: &str = "SELECT EXISTS (SELECT 1 FROM subscription WHERE definition_id = $1)";
    if let Err(refusal) = check_version(connection, VERSION_OF, id, expected).await? {
        return Ok(Err(refusal));
    }
    if sqlx::query_scalar(USED).bind(id).fetch_one(&mut *connection).await? {
        return Ok(Err(RegistryError::InUse));
    }
    sqlx::query("DELETE FROM event_definition WHERE id = $1").bind(id).execute(&mut *connection).await?;
    raise_version(connection).await.map(Ok)
}

async fn id_of(connection: &mut PgConnection, key: &EventKey) -> Result<Option<String>, sqlx::Error> {
    let sql = AssertSqlSafe(format!("SELECT id FROM event_definition WHERE {BY_KEY}"));
    let row = bind_key(sqlx::query(sql), key).fetch_optional(connection).await?;
    row.map(|row| row.try_get(0)).transpose()
}

/// Reads [`COLUMNS`], the first of which is at `start`.
pub(super) fn read(row: &PgRow, start: usize) -> Result<Definition, sqlx::Error> {
    let key = EventKey {
        source_service: row.try_get(start + 1)?,
        event_type: row.try_get(start + 2)?,
        resource_type: row.try_get(start + 3)?,
        operation_type: row.try_get(start + 4)?,
    };
    Ok(Definition {
        id: row.try_get(start)?,
        fields: DefinitionFields { key, description: row.try_get(start + 5)? },
        created_at: row.try_get(start + 6)?,
        updated_at: row.try_get(start + 7)?,
        version: row.try_get(start + 8)?,
    })
}

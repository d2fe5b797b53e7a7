use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Definition, DefinitionFields, DefinitionStore, EventKey, Page, PageRequest, RegistryError,
};
use sqlx::sqlite::{Sqlite, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, QueryBuilder, Row};

use super::{Refusal, RegistryTables, check_version, page};
use crate::sqlite::clock::{NOW_MS, time};
use crate::sqlite::errors::doing;

pub(super) const COLUMNS: &str = "event_definition.id, source_service, event_type, resource_type, operation_type, \
     description, event_definition.created_at, event_definition.updated_at, event_definition.version";
pub(super) const COLUMN_COUNT: usize = 9;

const VERSION_OF: &str = "SELECT version FROM event_definition WHERE id = ?";
const BY_KEY: &str = "source_service = ?1 AND event_type = ?2 AND resource_type = ?3 AND operation_type = ?4";

#[async_trait]
impl DefinitionStore for RegistryTables {
    async fn create_definition(&self, fields: DefinitionFields) -> Result<Definition, RegistryError> {
        let arguments = (uuid::Uuid::now_v7().to_string(), fields);
        self.change("create a definition", arguments, |connection, arguments| Box::pin(create(connection, arguments)))
            .await
    }

    async fn update_definition(
        &self,
        id: &str,
        fields: DefinitionFields,
        expected: Option<i64>,
    ) -> Result<Definition, RegistryError> {
        let arguments = (id.to_owned(), fields, expected);
        self.change("update a definition", arguments, |connection, arguments| Box::pin(update(connection, arguments)))
            .await
    }

    async fn delete_definition(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError> {
        let arguments = (id.to_owned(), expected);
        self.change("delete a definition", arguments, |connection, arguments| Box::pin(delete(connection, arguments)))
            .await
    }

    async fn definition(&self, id: &str) -> Result<Option<Definition>, StoreError> {
        let sql = AssertSqlSafe(format!("SELECT {COLUMNS} FROM event_definition WHERE id = ?"));
        let row =
            doing("read a definition", sqlx::query(sql).bind(id).fetch_optional(self.database.operators())).await?;
        doing("read a definition", async { row.map(|row| read(&row, 0)).transpose() }).await
    }

    async fn definition_of_key(&self, key: &EventKey) -> Result<Option<Definition>, StoreError> {
        let sql = AssertSqlSafe(format!("SELECT {COLUMNS} FROM event_definition WHERE {BY_KEY}"));
        let query = sqlx::query(sql).bind(&key.source_service).bind(&key.event_type);
        let query = query.bind(&key.resource_type).bind(&key.operation_type);
        let row = doing("read a definition", query.fetch_optional(self.database.operators())).await?;
        doing("read a definition", async { row.map(|row| read(&row, 0)).transpose() }).await
    }

    async fn definitions(&self, request: PageRequest) -> Result<Page<Definition>, StoreError> {
        let all = |query: &mut QueryBuilder<Sqlite>| {
            query.push(" WHERE true");
        };
        let page = page(&self.database, COLUMNS, "event_definition", request, all, |row| read(row, 0));
        doing("list the definitions", page).await
    }
}

async fn create(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, DefinitionFields)>,
) -> Result<Result<Definition, Refusal>, sqlx::Error> {
    let (id, fields) = &*arguments;
    if id_of(connection, &fields.key).await?.is_some() {
        return Ok(Err(Refusal::Duplicate));
    }
    let sql = format!(
        "INSERT INTO event_definition (source_service, event_type, resource_type, operation_type, description, id,
             created_at, updated_at)
         VALUES (?, ?, ?, ?, ?, ?, {NOW_MS}, {NOW_MS}) RETURNING {COLUMNS}"
    );
    write(connection, sql, id, fields).await.map(Ok)
}

async fn update(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, DefinitionFields, Option<i64>)>,
) -> Result<Result<Definition, Refusal>, sqlx::Error> {
    let (id, fields, expected) = &*arguments;
    if let Err(refusal) = check_version(connection, VERSION_OF, id, *expected).await? {
        return Ok(Err(refusal));
    }
    if id_of(connection, &fields.key).await?.is_some_and(|other| other != *id) {
        return Ok(Err(Refusal::Duplicate));
    }
    let sql = format!(
        "UPDATE event_definition SET source_service = ?, event_type = ?, resource_type = ?, operation_type = ?,
             description = ?, updated_at = {NOW_MS}, version = version + 1
         WHERE id = ? RETURNING {COLUMNS}"
    );
    write(connection, sql, id, fields).await.map(Ok)
}

/// Both statements have the same binds, the id last.
async fn write(
    connection: &mut SqliteConnection,
    sql: String,
    id: &str,
    fields: &DefinitionFields,
) -> Result<Definition, sqlx::Error> {
    let query = sqlx::query(AssertSqlSafe(sql)).bind(&fields.key.source_service).bind(&fields.key.event_type);
    let query = query.bind(&fields.key.resource_type).bind(&fields.key.operation_type);
    read(&query.bind(&fields.description).bind(id).fetch_one(connection).await?, 0)
}

async fn delete(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, Option<i64>)>,
) -> Result<Result<(), Refusal>, sqlx::Error> {
    const USED: &str = "SELECT EXISTS (SELECT 1 FROM subscription WHERE definition_id = ?)";
    let (id, expected) = &*arguments;
    if let Err(refusal) = check_version(connection, VERSION_OF, id, *expected).await? {
        return Ok(Err(refusal));
    }
    if sqlx::query_scalar(USED).bind(id).fetch_one(&mut *connection).await? {
        return Ok(Err(Refusal::InUse));
    }
    sqlx::query("DELETE FROM event_definition WHERE id = ?").bind(id).execute(connection).await?;
    Ok(Ok(()))
}

async fn id_of(connection: &mut SqliteConnection, key: &EventKey) -> Result<Option<String>, sqlx::Error> {
    let sql = AssertSqlSafe(format!("SELECT id FROM event_definition WHERE {BY_KEY}"));
    let query = sqlx::query_scalar(sql).bind(&key.source_service).bind(&key.event_type);
    query.bind(&key.resource_type).bind(&key.operation_type).fetch_optional(connection).await
}

/// Reads [`COLUMNS`], the first of which is at `start`.
pub(super) fn read(row: &SqliteRow, start: usize) -> Result<Definition, sqlx::Error> {
    let key = EventKey {
        source_service: row.try_get(start + 1)?,
        event_type: row.try_get(start + 2)?,
        resource_type: row.try_get(start + 3)?,
        operation_type: row.try_get(start + 4)?,
    };
    Ok(Definition {
        id: row.try_get(start)?,
        fields: DefinitionFields { key, description: row.try_get(start + 5)? },
        created_at: time(row.try_get(start + 6)?),
        updated_at: time(row.try_get(start + 7)?),
        version: row.try_get(start + 8)?,
    })
}

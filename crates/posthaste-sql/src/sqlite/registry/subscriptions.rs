use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Created, Page, PageRequest, RegistryError, Subscription, SubscriptionFields, SubscriptionFilter, SubscriptionStore,
};
use sqlx::sqlite::{Sqlite, SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, QueryBuilder, Row};

use super::{Refusal, RegistryTables, check_version, page, raise_version};
use crate::sqlite::clock::{NOW_MS, millis, span, time};
use crate::sqlite::errors::doing;
use crate::sqlite::json::json;
use crate::subscription_filter::{filter, filter_text};

pub(super) const COLUMNS: &str = "subscription.id, subscriber_id, definition_id, endpoint, endpoint_digest, \
     payload_type, auth_type, credentials_sealed, header_names, timeout_ms, max_retry, tenant_id, active, filter, \
     subscription.created_at, subscription.updated_at, subscription.version";

const VERSION_OF: &str = "SELECT version FROM subscription WHERE id = ?";

#[async_trait]
impl SubscriptionStore for RegistryTables {
    async fn create_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
    ) -> Result<Created<Subscription>, RegistryError> {
        let arguments = (id.to_owned(), fields);
        // Without `change`, because the version must not rise if the subscription exists already.
        let create = self.database.write_with("create a subscription", arguments, |connection, arguments| {
            Box::pin(create(connection, arguments))
        });
        create.await?.map_err(RegistryError::from)
    }

    async fn update_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
        expected: Option<i64>,
    ) -> Result<Subscription, RegistryError> {
        let arguments = (id.to_owned(), fields, expected);
        self.change("update a subscription", arguments, |connection, arguments| Box::pin(update(connection, arguments)))
            .await
    }

    async fn delete_subscription(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError> {
        let arguments = (id.to_owned(), expected);
        self.change("delete a subscription", arguments, |connection, arguments| Box::pin(delete(connection, arguments)))
            .await
    }

    async fn subscription(&self, id: &str) -> Result<Option<Subscription>, StoreError> {
        let sql = AssertSqlSafe(format!("SELECT {COLUMNS} FROM subscription WHERE id = ?"));
        let row =
            doing("read a subscription", sqlx::query(sql).bind(id).fetch_optional(self.database.operators())).await?;
        doing("read a subscription", async { row.map(|row| read(&row, 0)).transpose() }).await
    }

    async fn subscriptions(
        &self,
        filter: &SubscriptionFilter,
        request: PageRequest,
    ) -> Result<Page<Subscription>, StoreError> {
        let conditions = |query: &mut QueryBuilder<Sqlite>| {
            query.push(" WHERE true");
            if let Some(subscriber_id) = &filter.subscriber_id {
                query.push(" AND subscriber_id = ").push_bind(subscriber_id.clone());
            }
            if let Some(definition_id) = &filter.definition_id {
                query.push(" AND definition_id = ").push_bind(definition_id.clone());
            }
        };
        let page = page(&self.database, COLUMNS, "subscription", request, conditions, |row| read(row, 0));
        doing("list the subscriptions", page).await
    }

    async fn has_sealed_credentials(&self) -> Result<bool, StoreError> {
        let found = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sealing)");
        doing("look for sealed credentials", found.fetch_one(self.database.operators())).await
    }
}

async fn create(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, SubscriptionFields)>,
) -> Result<Result<Created<Subscription>, Refusal>, sqlx::Error> {
    let (id, fields) = &*arguments;
    if !is_defined(connection, fields).await? {
        return Ok(Err(Refusal::UnknownDefinition));
    }
    if let Some(existing) = same(connection, fields).await? {
        return Ok(Ok(Created::Existing(existing)));
    }
    let sql = format!(
        "INSERT INTO subscription (subscriber_id, definition_id, endpoint, endpoint_digest, payload_type, auth_type,
             credentials_sealed, header_names, timeout_ms, max_retry, tenant_id, active, filter, id, created_at, updated_at)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {NOW_MS}, {NOW_MS}) RETURNING {COLUMNS}"
    );
    let made = write(connection, sql, id, fields).await?;
    raise_version(connection).await?;
    Ok(Ok(Created::New(made)))
}

async fn update(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, SubscriptionFields, Option<i64>)>,
) -> Result<Result<Subscription, Refusal>, sqlx::Error> {
    let (id, fields, expected) = &*arguments;
    if let Err(refusal) = check_version(connection, VERSION_OF, id, *expected).await? {
        return Ok(Err(refusal));
    }
    if !is_defined(connection, fields).await? {
        return Ok(Err(Refusal::UnknownDefinition));
    }
    let sql = format!(
        "UPDATE subscription SET subscriber_id = ?, definition_id = ?, endpoint = ?, endpoint_digest = ?,
             payload_type = ?, auth_type = ?, credentials_sealed = ?, header_names = ?, timeout_ms = ?, max_retry = ?,
             tenant_id = ?, active = ?, filter = ?, updated_at = {NOW_MS}, version = version + 1
         WHERE id = ? RETURNING {COLUMNS}"
    );
    write(connection, sql, id, fields).await.map(Ok)
}

async fn delete(
    connection: &mut SqliteConnection,
    arguments: Arc<(String, Option<i64>)>,
) -> Result<Result<(), Refusal>, sqlx::Error> {
    let (id, expected) = &*arguments;
    if let Err(refusal) = check_version(connection, VERSION_OF, id, *expected).await? {
        return Ok(Err(refusal));
    }
    sqlx::query("DELETE FROM subscription WHERE id = ?").bind(id).execute(connection).await?;
    Ok(Ok(()))
}

async fn is_defined(connection: &mut SqliteConnection, fields: &SubscriptionFields) -> Result<bool, sqlx::Error> {
    let sql = "SELECT EXISTS (SELECT 1 FROM event_definition WHERE id = ?)";
    sqlx::query_scalar(sql).bind(&fields.definition_id).fetch_one(connection).await
}

/// The oldest subscription of the same subscriber, tenant and filter to the same events at the same address.
async fn same(
    connection: &mut SqliteConnection,
    fields: &SubscriptionFields,
) -> Result<Option<Subscription>, sqlx::Error> {
    let sql = format!(
        "SELECT {COLUMNS} FROM subscription
         WHERE subscriber_id = ? AND definition_id = ? AND endpoint_digest = ? AND tenant_id IS ? AND filter IS ?
         ORDER BY id LIMIT 1"
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(&fields.subscriber_id).bind(&fields.definition_id);
    let query = query.bind(&fields.endpoint_digest[..]).bind(&fields.tenant_id).bind(filter_text(&fields.filter)?);
    query.fetch_optional(connection).await?.map(|row| read(&row, 0)).transpose()
}

/// Both statements have the same binds, the id last.
async fn write(
    connection: &mut SqliteConnection,
    sql: String,
    id: &str,
    fields: &SubscriptionFields,
) -> Result<Subscription, sqlx::Error> {
    if !fields.credentials_sealed.is_empty() {
        let mark = "INSERT INTO sealing (only) VALUES (1) ON CONFLICT DO NOTHING";
        sqlx::query(mark).execute(&mut *connection).await?;
    }
    let header_names = json(&fields.header_names)?;
    let row = sqlx::query(AssertSqlSafe(sql))
        .bind(&fields.subscriber_id)
        .bind(&fields.definition_id)
        .bind(&fields.endpoint)
        .bind(&fields.endpoint_digest[..])
        .bind(&fields.payload_type)
        .bind(&fields.auth_type)
        .bind(&fields.credentials_sealed[..])
        .bind(header_names)
        .bind(fields.timeout.map(millis))
        .bind(fields.max_retry)
        .bind(&fields.tenant_id)
        .bind(fields.active)
        .bind(filter_text(&fields.filter)?)
        .bind(id)
        .fetch_one(connection)
        .await?;
    read(&row, 0)
}

/// Reads [`COLUMNS`], the first of which is at `start`.
pub(super) fn read(row: &SqliteRow, start: usize) -> Result<Subscription, sqlx::Error> {
    let header_names: String = row.try_get(start + 8)?;
    let fields = SubscriptionFields {
        subscriber_id: row.try_get(start + 1)?,
        definition_id: row.try_get(start + 2)?,
        endpoint: row.try_get(start + 3)?,
        endpoint_digest: Bytes::from(row.try_get::<Vec<u8>, _>(start + 4)?),
        payload_type: row.try_get(start + 5)?,
        auth_type: row.try_get(start + 6)?,
        credentials_sealed: Bytes::from(row.try_get::<Vec<u8>, _>(start + 7)?),
        header_names: serde_json::from_str(&header_names).map_err(|error| sqlx::Error::Decode(error.into()))?,
        timeout: row.try_get::<Option<i64>, _>(start + 9)?.map(span),
        max_retry: row.try_get(start + 10)?,
        tenant_id: row.try_get(start + 11)?,
        active: row.try_get(start + 12)?,
        filter: filter(row.try_get(start + 13)?)?,
    };
    Ok(Subscription {
        id: row.try_get(start)?,
        fields,
        created_at: time(row.try_get(start + 14)?),
        updated_at: time(row.try_get(start + 15)?),
        version: row.try_get(start + 16)?,
    })
}

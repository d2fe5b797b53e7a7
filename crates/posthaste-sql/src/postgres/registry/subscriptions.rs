use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{
    Created, Page, PageRequest, RegistryError, Subscription, SubscriptionFields, SubscriptionFilter, SubscriptionStore,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Postgres, QueryBuilder, Row};

use super::{RegistryTables, check_version, page, raise_version};
use crate::postgres::errors::store_error;
use crate::postgres::texts::storable_text;
use crate::subscription_filter::{filter, filter_text};

pub(super) const COLUMNS: &str = "subscription.id, subscriber_id, definition_id, endpoint, endpoint_digest, \
     payload_type, auth_type, credentials_sealed, header_names, timeout_ms, max_retry, tenant_id, active, filter, \
     subscription.created_at, subscription.updated_at, subscription.version";

const VERSION_OF: &str = "SELECT version FROM subscription WHERE id = $1";

/// The oldest subscription of the same subscriber, tenant and filter to the same events at the same address. Binds: the
/// subscriber, the definition, the digest of the address, the tenant, the filter.
pub(super) fn same() -> String {
    format!(
        "SELECT {COLUMNS} FROM subscription
         WHERE subscriber_id = $1 AND definition_id = $2 AND endpoint_digest = $3 AND tenant_id IS NOT DISTINCT FROM $4
             AND filter IS NOT DISTINCT FROM $5
         ORDER BY id LIMIT 1"
    )
}

#[async_trait]
impl SubscriptionStore for RegistryTables {
    async fn create_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
    ) -> Result<Created<Subscription>, RegistryError> {
        let id = id.to_owned();
        self.change("create a subscription", |connection| {
            Box::pin(async move { create(connection, &id, &fields).await })
        })
        .await
    }

    async fn update_subscription(
        &self,
        id: &str,
        fields: SubscriptionFields,
        expected: Option<i64>,
    ) -> Result<Subscription, RegistryError> {
        let id = id.to_owned();
        self.change("update a subscription", |connection| {
            Box::pin(async move { update(connection, &id, &fields, expected).await })
        })
        .await
    }

    async fn delete_subscription(&self, id: &str, expected: Option<i64>) -> Result<(), RegistryError> {
        let id = id.to_owned();
        self.change("delete a subscription", |connection| {
            Box::pin(async move { delete(connection, &id, expected).await })
        })
        .await
    }

    async fn subscription(&self, id: &str) -> Result<Option<Subscription>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM subscription WHERE id = $1");
        self.find("read a subscription", sql, id, |row| read(row, 0)).await
    }

    async fn subscriptions(
        &self,
        filter: &SubscriptionFilter,
        request: PageRequest,
    ) -> Result<Page<Subscription>, StoreError> {
        let conditions = |query: &mut QueryBuilder<Postgres>| push_conditions(query, filter);
        let table = (COLUMNS, "subscription");
        page(self, "list the subscriptions", table, request, conditions, |row| read(row, 0)).await
    }

    async fn has_sealed_credentials(&self) -> Result<bool, StoreError> {
        const DOING: &str = "look for sealed credentials";
        let rows = self.database.read(DOING, sqlx::query("SELECT EXISTS (SELECT 1 FROM sealing)")).await?;
        rows.first().map_or(Ok(false), |row| row.try_get(0)).map_err(|error| store_error(DOING, error))
    }
}

pub(super) fn push_conditions(query: &mut QueryBuilder<Postgres>, filter: &SubscriptionFilter) {
    query.push(" WHERE true");
    if let Some(subscriber_id) = &filter.subscriber_id {
        query.push(" AND subscriber_id = ").push_bind(storable_text(subscriber_id));
    }
    if let Some(definition_id) = &filter.definition_id {
        query.push(" AND definition_id = ").push_bind(storable_text(definition_id));
    }
}

async fn create(
    connection: &mut PgConnection,
    id: &str,
    fields: &SubscriptionFields,
) -> Result<Result<Created<Subscription>, RegistryError>, sqlx::Error> {
    if !is_defined(connection, fields).await? {
        return Ok(Err(RegistryError::UnknownDefinition));
    }
    let same = sqlx::query(AssertSqlSafe(same())).bind(&fields.subscriber_id).bind(&fields.definition_id);
    let same = same.bind(&fields.endpoint_digest[..]).bind(&fields.tenant_id).bind(filter_text(&fields.filter)?);
    if let Some(existing) = same.fetch_optional(&mut *connection).await? {
        return Ok(Ok(Created::Existing(read(&existing, 0)?)));
    }
    let sql = format!(
        "INSERT INTO subscription (subscriber_id, definition_id, endpoint, endpoint_digest, payload_type, auth_type,
             credentials_sealed, header_names, timeout_ms, max_retry, tenant_id, active, filter, id)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) RETURNING {COLUMNS}"
    );
    Ok(Ok(Created::New(write(connection, sql, id, fields).await?)))
}

async fn update(
    connection: &mut PgConnection,
    id: &str,
    fields: &SubscriptionFields,
    expected: Option<i64>,
) -> Result<Result<Subscription, RegistryError>, sqlx::Error> {
    if let Err(refusal) = check_version(connection, VERSION_OF, id, expected).await? {
        return Ok(Err(refusal));
    }
    if !is_defined(connection, fields).await? {
        return Ok(Err(RegistryError::UnknownDefinition));
    }
    let sql = format!(
        "UPDATE subscription SET subscriber_id = $1, definition_id = $2, endpoint = $3, endpoint_digest = $4,
             payload_type = $5, auth_type = $6, credentials_sealed = $7, header_names = $8, timeout_ms = $9,
             max_retry = $10, tenant_id = $11, active = $12, filter = $13, updated_at = clock_timestamp(),
             version = version + 1
         WHERE id = $14 RETURNING {COLUMNS}"
    );
    write(connection, sql, id, fields).await.map(Ok)
}

async fn delete(
    connection: &mut PgConnection,
    id: &str,
    expected: Option<i64>,
) -> Result<Result<(), RegistryError>, sqlx::Error> {
    if let Err(refusal) = check_version(connection, VERSION_OF, id, expected).await? {
        return Ok(Err(refusal));
    }
    sqlx::query("DELETE FROM subscription WHERE id = $1").bind(id).execute(&mut *connection).await?;
    raise_version(connection).await.map(Ok)
}

async fn is_defined(connection: &mut PgConnection, fields: &SubscriptionFields) -> Result<bool, sqlx::Error> {
    let sql = "SELECT EXISTS (SELECT 1 FROM event_definition WHERE id = $1)";
    sqlx::query_scalar(sql).bind(storable_text(&fields.definition_id)).fetch_one(connection).await
}

/// Both statements have the same binds, the id last.
async fn write(
    connection: &mut PgConnection,
    sql: String,
    id: &str,
    fields: &SubscriptionFields,
) -> Result<Subscription, sqlx::Error> {
    if !fields.credentials_sealed.is_empty() {
        let mark = "INSERT INTO sealing DEFAULT VALUES ON CONFLICT DO NOTHING";
        sqlx::query(mark).execute(&mut *connection).await?;
    }
    let row = sqlx::query(AssertSqlSafe(sql))
        .bind(&fields.subscriber_id)
        .bind(&fields.definition_id)
        .bind(&fields.endpoint)
        .bind(&fields.endpoint_digest[..])
        .bind(&fields.payload_type)
        .bind(&fields.auth_type)
        .bind(&fields.credentials_sealed[..])
        .bind(&fields.header_names)
        .bind(fields.timeout.map(|timeout| i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX)))
        .bind(fields.max_retry.map(i64::from))
        .bind(&fields.tenant_id)
        .bind(fields.active)
        .bind(filter_text(&fields.filter)?)
        .bind(id)
        .fetch_one(&mut *connection)
        .await?;
    raise_version(connection).await?;
    read(&row, 0)
}

/// Reads [`COLUMNS`], the first of which is at `start`.
pub(super) fn read(row: &PgRow, start: usize) -> Result<Subscription, sqlx::Error> {
    let timeout: Option<i64> = row.try_get(start + 9)?;
    let max_retry: Option<i64> = row.try_get(start + 10)?;
    let max_retry = max_retry.map(u32::try_from).transpose().map_err(|error| sqlx::Error::Decode(error.into()))?;
    let fields = SubscriptionFields {
        subscriber_id: row.try_get(start + 1)?,
        definition_id: row.try_get(start + 2)?,
        endpoint: row.try_get(start + 3)?,
        endpoint_digest: Bytes::from(row.try_get::<Vec<u8>, _>(start + 4)?),
        payload_type: row.try_get(start + 5)?,
        auth_type: row.try_get(start + 6)?,
        credentials_sealed: Bytes::from(row.try_get::<Vec<u8>, _>(start + 7)?),
        header_names: row.try_get(start + 8)?,
        timeout: timeout.map(|millis| Duration::from_millis(millis.unsigned_abs())),
        max_retry,
        tenant_id: row.try_get(start + 11)?,
        active: row.try_get(start + 12)?,
        filter: filter(row.try_get(start + 13)?)?,
    };
    Ok(Subscription {
        id: row.try_get(start)?,
        fields,
        created_at: row.try_get(start + 14)?,
        updated_at: row.try_get(start + 15)?,
        version: row.try_get(start + 16)?,
    })
}

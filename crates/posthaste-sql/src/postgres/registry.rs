use async_trait::async_trait;
use futures_util::future::BoxFuture;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Definition, Page, PageRequest, Registry, RegistryError, Subscription};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Postgres, QueryBuilder, Row};

use super::database::Database;
use super::errors::store_error;
use super::log::{READ, STATEMENT_TIMEOUT, WRITE, limited};
use super::texts::storable_text;
use crate::session::Failed;
use crate::unreadable::readable;

mod definitions;
#[cfg(test)]
mod plans;
mod subscriptions;

/// Begins a transaction whose statements all see the same state.
const SNAPSHOT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL jit = off";

const VERSION: &str = "SELECT version FROM registry_version";

/// The first statement of every change. The statements after it see what the change before has committed.
const LOCK_VERSION: &str = "SELECT version FROM registry_version FOR UPDATE";

/// The registry of the hub, in the tables `event_definition` and `subscription`. Many processes may change it.
#[derive(Clone)]
pub struct RegistryTables {
    database: Database,
}

#[async_trait]
impl Registry for RegistryTables {
    async fn version(&self) -> Result<i64, StoreError> {
        const DOING: &str = "read the version of the registry";
        let read = async {
            let rows = self.database.pipeline().fetch(sqlx::query(VERSION)).await?;
            Ok::<_, Failed>(rows.first().map_or(Ok(0), |row| row.try_get(0))?)
        };
        limited(DOING, STATEMENT_TIMEOUT, read).await
    }

    async fn load_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), StoreError> {
        limited("load the active subscriptions", STATEMENT_TIMEOUT, self.read_active()).await
    }
}

impl RegistryTables {
    /// The registry of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { database }
    }

    async fn read_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), Failed> {
        // One snapshot, so that the version belongs to the rows.
        let mut reading = self.database.pipeline().begin(SNAPSHOT).await?;
        let version = sqlx::query_scalar(VERSION).fetch_one(&mut *reading).await?;
        let sql = format!(
            "SELECT {}, {} FROM subscription JOIN event_definition ON event_definition.id = subscription.definition_id
             WHERE subscription.active ORDER BY subscription.id",
            definitions::COLUMNS,
            subscriptions::COLUMNS
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut *reading).await?;
        reading.commit().await?;
        let pair = |row: &PgRow| Ok((definitions::read(row, 0)?, subscriptions::read(row, definitions::COLUMN_COUNT)?));
        Ok((version, readable("subscription", &rows, definitions::COLUMN_COUNT, pair)))
    }

    /// Makes one change, unless it is refused. Changes run one after the other, whichever process makes them. `change`
    /// raises the version itself if it changes something, see [`raise_version`].
    async fn change<T, F>(&self, doing: &'static str, change: F) -> Result<T, RegistryError>
    where
        F: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<Result<T, RegistryError>, sqlx::Error>> + Send,
    {
        let work = async {
            let mut work = self.database.operators().begin(WRITE).await?;
            sqlx::query(LOCK_VERSION).execute(&mut *work).await?;
            // A refusal comes before the first write, so the transaction may commit.
            let changed = change(&mut work).await?;
            work.commit().await?;
            Ok::<_, Failed>(changed)
        };
        limited(doing, STATEMENT_TIMEOUT, work).await?
    }

    /// The row that the statement finds by this id.
    async fn find<T>(
        &self,
        doing: &'static str,
        sql: String,
        id: &str,
        read: impl Fn(&PgRow) -> Result<T, sqlx::Error>,
    ) -> Result<Option<T>, StoreError> {
        let rows = self.database.read(doing, sqlx::query(AssertSqlSafe(sql)).bind(storable_text(id))).await?;
        rows.first().map(read).transpose().map_err(|error| store_error(doing, error))
    }
}

async fn raise_version(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE registry_version SET version = version + 1").execute(connection).await.map(|_| ())
}

/// Refuses a change of a row that does not exist or is not at the version that the caller expects.
async fn check_version(
    connection: &mut PgConnection,
    select: &'static str,
    id: &str,
    expected: Option<i64>,
) -> Result<Result<(), RegistryError>, sqlx::Error> {
    let found: Option<i64> = sqlx::query_scalar(select).bind(storable_text(id)).fetch_optional(connection).await?;
    Ok(match (found, expected) {
        (None, _) => Err(RegistryError::NotFound),
        (Some(found), Some(expected)) if found != expected => Err(RegistryError::Stale { expected, found }),
        _ => Ok(()),
    })
}

/// One page of the table `from`, and one row more than requested: if it exists, there is a next page. `push_conditions`
/// adds the first conditions to the WHERE.
fn items(
    columns: &'static str,
    from: &'static str,
    request: &PageRequest,
    push_conditions: impl Fn(&mut QueryBuilder<Postgres>),
) -> QueryBuilder<Postgres> {
    let mut items = QueryBuilder::new(format!("SELECT {columns} FROM {from}"));
    push_conditions(&mut items);
    if let Some(after) = &request.after {
        items.push(" AND id > ").push_bind(storable_text(after));
    }
    items.push(" ORDER BY id LIMIT ").push_bind(i64::from(request.size) + 1);
    if request.after.is_none() {
        items.push(" OFFSET ").push_bind(i64::from(request.page) * i64::from(request.size));
    }
    items
}

/// One page of the table `from`, whose first column is the key, and the number of all rows.
async fn page<T>(
    registry: &RegistryTables,
    doing: &'static str,
    (columns, from): (&'static str, &'static str),
    request: PageRequest,
    push_conditions: impl Fn(&mut QueryBuilder<Postgres>) + Sync,
    read: impl Fn(&PgRow) -> Result<T, sqlx::Error>,
) -> Result<Page<T>, StoreError> {
    let page = async {
        let mut reading = registry.database.operators().begin(READ).await?;
        let rows = items(columns, from, &request, &push_conditions).build().fetch_all(&mut *reading).await?;
        let mut total = QueryBuilder::new(format!("SELECT count(*) FROM {from}"));
        push_conditions(&mut total);
        let total: i64 = total.build_query_scalar().fetch_one(&mut *reading).await?;
        reading.commit().await?;
        Ok::<_, Failed>((rows, total))
    };
    let (mut rows, total) = limited(doing, STATEMENT_TIMEOUT, page).await?;
    let has_more = rows.len() > request.size as usize;
    rows.truncate(request.size as usize);
    Ok(Page { items: readable(from, &rows, 0, read), total: total.unsigned_abs(), has_more })
}

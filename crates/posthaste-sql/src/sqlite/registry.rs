use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Definition, Page, PageRequest, Registry, RegistryError, Subscription};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, QueryBuilder, Sqlite};

use super::database::Database;
use super::errors::doing;
use crate::unreadable::readable;

mod definitions;
mod subscriptions;

/// The registry of the hub, in the tables `event_definition` and `subscription`.
#[derive(Clone)]
pub struct RegistryTables {
    database: Database,
}

/// Why a change was refused. The check runs before the first write, so the transaction may commit.
#[derive(Clone, Copy)]
enum Refusal {
    Duplicate,
    NotFound,
    InUse,
    Stale { expected: i64, found: i64 },
    UnknownDefinition,
}

impl From<Refusal> for RegistryError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Duplicate => Self::Duplicate,
            Refusal::NotFound => Self::NotFound,
            Refusal::InUse => Self::InUse,
            Refusal::Stale { expected, found } => Self::Stale { expected, found },
            Refusal::UnknownDefinition => Self::UnknownDefinition,
        }
    }
}

#[async_trait]
impl Registry for RegistryTables {
    async fn version(&self) -> Result<i64, StoreError> {
        let version = sqlx::query_scalar(VERSION).fetch_one(self.database.readers());
        doing("read the version of the registry", version).await
    }

    async fn load_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), StoreError> {
        doing("load the active subscriptions", self.read_active()).await
    }
}

impl RegistryTables {
    /// The registry of a database whose hub tables are up to date.
    pub fn new(database: Database) -> Self {
        Self { database }
    }

    async fn read_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), sqlx::Error> {
        // One transaction, so that the version belongs to the rows.
        let mut reading = self.database.readers().begin().await?;
        let version = sqlx::query_scalar(VERSION).fetch_one(&mut *reading).await?;
        let sql = format!(
            "SELECT {}, {} FROM subscription JOIN event_definition ON event_definition.id = subscription.definition_id
             WHERE subscription.active = 1 ORDER BY subscription.id",
            definitions::COLUMNS,
            subscriptions::COLUMNS
        );
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&mut *reading).await?;
        reading.commit().await?;
        let pair =
            |row: &SqliteRow| Ok((definitions::read(row, 0)?, subscriptions::read(row, definitions::COLUMN_COUNT)?));
        Ok((version, readable("subscription", &rows, definitions::COLUMN_COUNT, pair)))
    }

    /// Makes one change. Unless it is refused, the version of the registry rises in the same transaction.
    async fn change<A, T, F>(&self, doing: &'static str, arguments: A, change: F) -> Result<T, RegistryError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection, Arc<A>) -> BoxFuture<'c, Result<Result<T, Refusal>, sqlx::Error>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        let changed = self.database.write_with(doing, arguments, move |connection, arguments| {
            let change = change.clone();
            Box::pin(async move {
                let changed = change(&mut *connection, arguments).await?;
                if changed.is_ok() {
                    raise_version(connection).await?;
                }
                Ok(changed)
            })
        });
        changed.await?.map_err(RegistryError::from)
    }
}

const VERSION: &str = "SELECT version FROM registry_version";

async fn raise_version(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("UPDATE registry_version SET version = version + 1").execute(connection).await.map(|_| ())
}

/// Refuses a change of a row that does not exist or is not at the version that the caller expects.
async fn check_version(
    connection: &mut SqliteConnection,
    select: &'static str,
    id: &str,
    expected: Option<i64>,
) -> Result<Result<(), Refusal>, sqlx::Error> {
    let found: Option<i64> = sqlx::query_scalar(select).bind(id).fetch_optional(connection).await?;
    Ok(match (found, expected) {
        (None, _) => Err(Refusal::NotFound),
        (Some(found), Some(expected)) if found != expected => Err(Refusal::Stale { expected, found }),
        _ => Ok(()),
    })
}

/// One page of the table `from`, whose first column is the key, and the number of all rows. `push_conditions` adds the
/// first conditions to the WHERE of both queries.
async fn page<T>(
    database: &Database,
    columns: &'static str,
    from: &'static str,
    request: PageRequest,
    push_conditions: impl Fn(&mut QueryBuilder<Sqlite>),
    read: impl Fn(&SqliteRow) -> Result<T, sqlx::Error>,
) -> Result<Page<T>, sqlx::Error> {
    let mut items = QueryBuilder::<Sqlite>::new(format!("SELECT {columns} FROM {from}"));
    push_conditions(&mut items);
    if let Some(after) = &request.after {
        items.push(" AND id > ").push_bind(after.clone());
    }
    // Reads one row more than requested: if it exists, there is a next page.
    items.push(" ORDER BY id LIMIT ").push_bind(i64::from(request.size) + 1);
    if request.after.is_none() {
        items.push(" OFFSET ").push_bind(i64::from(request.page) * i64::from(request.size));
    }
    let mut rows = items.build().fetch_all(database.operators()).await?;
    let has_more = rows.len() > request.size as usize;
    rows.truncate(request.size as usize);
    let mut total = QueryBuilder::<Sqlite>::new(format!("SELECT count(*) FROM {from}"));
    push_conditions(&mut total);
    let total: i64 = total.build_query_scalar().fetch_one(database.operators()).await?;
    Ok(Page { items: readable(from, &rows, 0, read), total: total as u64, has_more })
}

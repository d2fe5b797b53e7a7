use futures_util::future::BoxFuture;
use posthaste_core::StoreError;
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{AssertSqlSafe, QueryBuilder, Sqlite};

use super::clock::{NOW_MS, time};
use super::database::Database;
use super::errors::store_error;
use super::unreadable::readable;
use crate::registry::{Definition, Page, PageRequest, RegistryError, Subscription};

mod definitions;
mod subscriptions;

/// Event definitions and subscriptions, with one number that rises with every change.
#[derive(Clone)]
pub struct Registry {
    database: Database,
}

/// Why a change was not made. It is found before anything is written, so its transaction may commit.
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

impl Registry {
    /// The registry of this database.
    pub fn new(database: Database) -> Self {
        Self { database }
    }

    /// Rises with every change: while it stands still, what [`load_active`](Self::load_active) answered is true.
    pub async fn version(&self) -> Result<i64, StoreError> {
        let version = sqlx::query_scalar(VERSION).fetch_one(self.database.readers()).await;
        version.map_err(|error| store_error("read the version of the registry", error))
    }

    /// Every active subscription with its definition, oldest first, and the version at which that holds. A row that
    /// cannot be read is reported and left out.
    pub async fn load_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), StoreError> {
        self.read_active().await.map_err(|error| store_error("load the active subscriptions", error))
    }

    async fn read_active(&self) -> Result<(i64, Vec<(Definition, Subscription)>), sqlx::Error> {
        // One transaction, so that the version is that of the rows.
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

    /// Makes one change; when it was not refused, the registry's version rises in the same transaction.
    async fn change<T, F>(&self, doing: &'static str, change: F) -> Result<T, RegistryError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<Result<T, Refusal>, sqlx::Error>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        let changed = self.database.write(doing, move |connection| {
            let change = change.clone();
            Box::pin(async move {
                let changed = change(&mut *connection).await?;
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

/// The version that stands, checked against the one that the caller expects.
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

/// One page of the table `from`, whose first column is the key, and how many rows there are. `push_conditions` begins the
/// WHERE of both queries.
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
    // One more than asked for: it shows whether there is a next page.
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

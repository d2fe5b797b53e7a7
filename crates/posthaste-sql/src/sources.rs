//! The databases of services that a hub reads, by their URLs.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::hub_store::{HubOutbox, SourceDatabase};
use posthaste_core::outbox::{Mode, OpenError, OperatorStore as _, Pool, Reader, Store, Table, TableName};
use posthaste_core::{BoxError, FaultKind, StoreError, lock};
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{Connection, MySqlConnection, MySqlPool, PgConnection, PgPool};
use tokio::time::timeout;

use crate::{DatabaseKind, MigrationText, UnknownDatabase, mysql, postgres, sqlite};

/// How long a new connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The connections of the pool, which looks for pending rows. Claims, settlements and renewals have one each beside it.
const POOL: u32 = 2;

/// An outbox table in the database of a service.
#[derive(Clone)]
pub struct SourceTable {
    kind: DatabaseKind,
    options: Options,
    table: TableName,
    mode: Mode,
}

#[derive(Clone)]
enum Options {
    Postgres(Box<PgConnectOptions>),
    MySql(Box<MySqlConnectOptions>),
    Sqlite(Box<SqliteConnectOptions>),
}

/// A URL that cannot be used. It never contains the URL, which may have a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BadSource {
    /// The URL names no database of a known kind.
    #[error(transparent)]
    UnknownDatabase(#[from] UnknownDatabase),
    /// The URL is wrong.
    #[error("it is not the URL of a {kind} database: write {example}")]
    BadUrl {
        /// The kind of database.
        kind: DatabaseKind,
        /// What a URL looks like.
        example: &'static str,
    },
    /// The database is in memory.
    #[error("it names a database in memory, which no other program can write to: write sqlite://FILE")]
    InMemory,
}

impl SourceTable {
    /// The table of this name in the database of this URL.
    pub fn new(url: &str, table: TableName, mode: Mode) -> Result<Self, BadSource> {
        let kind = DatabaseKind::of_url(url)?;
        let bad = |example| move |_: sqlx::Error| BadSource::BadUrl { kind, example };
        let options = match kind {
            DatabaseKind::Postgres => {
                let parsed = PgConnectOptions::from_str(url).map_err(bad("postgres://USER@HOST/DATABASE"))?;
                Options::Postgres(Box::new(parsed.application_name("posthaste")))
            }
            DatabaseKind::MySql => {
                let parsed = MySqlConnectOptions::from_str(url).map_err(bad("mysql://USER@HOST/DATABASE"))?;
                Options::MySql(Box::new(parsed))
            }
            DatabaseKind::Sqlite if url.contains(":memory:") || url.contains("mode=memory") => {
                return Err(BadSource::InMemory);
            }
            DatabaseKind::Sqlite => {
                let parsed = SqliteConnectOptions::from_str(url).map_err(bad("sqlite://FILE"))?;
                Options::Sqlite(Box::new(parsed))
            }
        };
        Ok(Self { kind, options, table, mode })
    }

    /// The kind of database.
    pub fn kind(&self) -> DatabaseKind {
        self.kind
    }

    /// The name of the table.
    pub fn table(&self) -> &TableName {
        &self.table
    }

    /// The address of the database without user and password. Two URLs of one database have the same one, if they name
    /// its host in the same way.
    pub fn database_name(&self) -> String {
        match &self.options {
            Options::Postgres(options) => postgres::name_of(options),
            Options::MySql(options) => {
                let (host, port) = (options.get_host(), options.get_port());
                format!("mysql://{host}:{port}/{}", options.get_database().unwrap_or_default())
            }
            Options::Sqlite(options) => {
                let file = options.get_filename();
                let file = std::fs::canonicalize(file).unwrap_or_else(|_| PathBuf::from(file));
                format!("sqlite://{}", file.display())
            }
        }
    }

    /// What else than its name distinguishes the table from others in the same database: the settings of the connection,
    /// which may name the schema.
    pub fn connection_settings(&self) -> &str {
        match &self.options {
            Options::Postgres(options) => options.get_options().unwrap_or_default(),
            Options::MySql(_) | Options::Sqlite(_) => "",
        }
    }

    /// The migrations of the table as text, for a user with the right to create tables.
    pub fn migrations(&self) -> Vec<MigrationText> {
        match self.kind {
            DatabaseKind::Postgres => postgres::migrations(&self.table, self.mode),
            DatabaseKind::MySql => mysql::migrations(&self.table, self.mode),
            DatabaseKind::Sqlite => sqlite::migrations(&self.table, self.mode),
        }
    }

    /// The database. It connects when it is opened.
    pub fn database(&self) -> Arc<dyn SourceDatabase> {
        let (table, mode) = (self.table.clone(), self.mode);
        match self.options.clone() {
            Options::Postgres(options) => Arc::new(Connected::new(*options, table, mode)),
            Options::MySql(options) => Arc::new(Connected::new(*options, table, mode)),
            Options::Sqlite(options) => Arc::new(Connected::new(*options, table, mode)),
        }
    }
}

/// The options of connections to one kind of database.
#[async_trait]
trait Connect: Clone + Send + Sync + 'static {
    type Pool: Pool<Self::Store> + Clone;
    type Store: Store;

    /// Connects once, to find out whether that is possible and why not: a pool would repeat the attempt until its timeout,
    /// and not say why it fails.
    async fn check(&self) -> Result<(), OpenError>;

    async fn pool(&self) -> Result<Self::Pool, OpenError>;

    async fn close(pool: Self::Pool);
}

/// Waits for a connection, and closes it.
async fn connect_once<C: Connection>(
    connect: impl Future<Output = Result<C, sqlx::Error>> + Send,
) -> Result<(), OpenError> {
    let unreachable = |error: BoxError| StoreError::new("connect to the database", FaultKind::Transient, error);
    match timeout(CONNECT_TIMEOUT, connect).await {
        Ok(Ok(connection)) => Ok(connection.close().await.map_err(|error| unreachable(error.into()))?),
        Ok(Err(error)) => Err(unreachable(error.into()).into()),
        Err(late) => Err(unreachable(late.into()).into()),
    }
}

#[async_trait]
impl Connect for PgConnectOptions {
    type Pool = PgPool;
    type Store = postgres::OutboxStore;

    async fn check(&self) -> Result<(), OpenError> {
        connect_once(PgConnection::connect_with(self)).await
    }

    async fn pool(&self) -> Result<PgPool, OpenError> {
        let pool = PgPoolOptions::new().max_connections(POOL).acquire_timeout(CONNECT_TIMEOUT);
        Ok(pool.connect_lazy_with(self.clone()))
    }

    async fn close(pool: PgPool) {
        pool.close().await;
    }
}

#[async_trait]
impl Connect for MySqlConnectOptions {
    type Pool = MySqlPool;
    type Store = mysql::OutboxStore;

    async fn check(&self) -> Result<(), OpenError> {
        connect_once(MySqlConnection::connect_with(self)).await
    }

    async fn pool(&self) -> Result<MySqlPool, OpenError> {
        let pool = MySqlPoolOptions::new().max_connections(POOL).acquire_timeout(CONNECT_TIMEOUT);
        Ok(pool.connect_lazy_with(self.clone()))
    }

    async fn close(pool: MySqlPool) {
        pool.close().await;
    }
}

#[async_trait]
impl Connect for SqliteConnectOptions {
    type Pool = sqlite::Database;
    type Store = sqlite::OutboxStore;

    /// A hub does not create the database of a service.
    async fn check(&self) -> Result<(), OpenError> {
        let file = self.get_filename();
        if file.exists() {
            return Ok(());
        }
        let problem = format!("database file {} does not exist", file.display());
        let remedy = "let the service create it, or correct the URL".to_owned();
        Err(OpenError::Unsuitable { problem, remedy })
    }

    async fn pool(&self) -> Result<sqlite::Database, OpenError> {
        let opened = sqlite::Database::open_with(self.clone()).await;
        opened.map_err(|error| StoreError::new("open the database", FaultKind::Transient, error).into())
    }

    async fn close(database: sqlite::Database) {
        database.close().await;
    }
}

/// A database that connects when it is opened.
struct Connected<C: Connect> {
    options: C,
    table: TableName,
    mode: Mode,
    pool: Mutex<Option<C::Pool>>,
}

impl<C: Connect> Connected<C> {
    fn new(options: C, table: TableName, mode: Mode) -> Self {
        Self { options, table, mode, pool: Mutex::default() }
    }

    async fn connect(&self) -> Result<C::Pool, OpenError> {
        self.options.check().await?;
        let connected = lock(&self.pool).clone();
        match connected {
            Some(pool) => Ok(pool),
            None => {
                let pool = self.options.pool().await?;
                *lock(&self.pool) = Some(pool.clone());
                Ok(pool)
            }
        }
    }
}

#[async_trait]
impl<C: Connect> SourceDatabase for Connected<C> {
    async fn check(&self) -> Result<(), OpenError> {
        self.options.check().await
    }

    async fn open(&self, lease: Duration) -> Result<Arc<dyn HubOutbox>, OpenError> {
        let store = self.connect().await?.open_existing(self.table.clone(), self.mode).await?;
        Ok(Arc::new(Table::open(store, Reader::Channels, lease).await?))
    }

    async fn count_pending(&self, lease: Duration, limit: usize) -> Result<u64, OpenError> {
        let store = self.connect().await?.open_existing(self.table.clone(), self.mode).await?;
        Table::check(&store, Reader::Channels, lease).await?;
        Ok(store.count_pending(limit).await?)
    }

    async fn migrate(&self) -> Result<(), OpenError> {
        self.connect().await?.open(self.table.clone(), self.mode).await.map(|_| ())
    }

    async fn close(&self) {
        let pool = lock(&self.pool).take();
        if let Some(pool) = pool {
            C::close(pool).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(url: &str) -> Result<SourceTable, BadSource> {
        SourceTable::new(url, TableName::default(), Mode::MultiNode)
    }

    #[test]
    fn urls_that_no_hub_can_read_are_refused_without_their_password() {
        for (url, why) in [
            ("", "none of postgres://"),
            ("oracle://me:secret@host/db", "none of postgres://"),
            ("postgres://me:secret@host:port/db", "postgres://USER@HOST/DATABASE"),
            ("mysql://me:secret@host:port/db", "mysql://USER@HOST/DATABASE"),
            ("sqlite::memory:", "sqlite://FILE"),
        ] {
            let error = source(url).err().unwrap().to_string();
            assert!(error.contains(why) && !error.contains("secret"), "{url}: {error}");
        }
    }

    #[test]
    fn the_name_of_a_database_has_no_password() {
        let name = |url: &str| source(url).unwrap().database_name();
        assert_eq!(name("postgresql://me:secret@host/shop?sslmode=require"), "postgres://host:5432/shop");
        assert_eq!(name("mariadb://me:secret@host/shop"), "mysql://host:3306/shop");
        assert_eq!(name("sqlite:///nowhere/shop.db"), "sqlite:///nowhere/shop.db");
    }
}

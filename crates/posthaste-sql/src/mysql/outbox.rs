use async_trait::async_trait;
use posthaste_core::hub_store::Fit;
use posthaste_core::outbox::{DeadHead, Mode, Notifier, OpenError, Pool, Store, TableName};
use sqlx::migrate::Migrator;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, MySqlPool};

use super::clock::NOW;
use super::errors::{number, store_error};
use super::migrations::{self, DIALECT};
use super::pooled::Pooled;
use crate::migrations::{Applied, bring_up, check_current, schema_of};
use crate::session::Session;

mod claim;
mod lease;
mod operator;
mod ownership;
#[cfg(test)]
mod plans;
mod rows;
mod settle;
mod write;

/// Begins a transaction of the outbox, whatever the isolation level of the session is. It locks only rows, never the
/// gaps between them into which the service's writers insert. Each statement sees every commit before it.
const BEGIN: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION";

/// The same on a connection that the outbox owns. A statement that waits for a locked row gives up soon, and is then
/// repeated without the locked rows. On MariaDB, the locks of a host that vanishes are released after ten seconds.
/// MySQL has no such limit, and reads that part as a comment.
const BEGIN_OWN: &str = "SET innodb_lock_wait_timeout = 1 /*M! , idle_transaction_timeout = 10 */;
     SET TRANSACTION ISOLATION LEVEL READ COMMITTED; START TRANSACTION";

/// Rows by their numbers, in the order of a bound list, which is a JSON array. Every planner reads them in this order.
/// So a statement that lists numbers in ascending order locks rows in that order, and it locks entries of the primary
/// key only: no deadlock is possible.
const ROWS: &str = "JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$')) AS listed
     STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON seq = listed.id";

/// An outbox table on MySQL or MariaDB, in the service's own database.
///
/// The service's transactions and the operator queries run on the service's pool. Claims, settlements and renewals have
/// a connection each of their own, opened with the options of the pool, so the service cannot exhaust them.
pub struct OutboxStore {
    pool: MySqlPool,
    claims: Session<MySql>,
    settlements: Session<MySql>,
    /// Used on the thread of renewals only.
    renewals: Session<MySql>,
    table: TableName,
    mode: Mode,
}

#[async_trait]
impl Pool<OutboxStore> for MySqlPool {
    async fn open(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        check_version(self).await?;
        for migrator in DIALECT.of_outbox(&table, mode) {
            migrate(self, &table, &migrator).await?;
        }
        Ok(OutboxStore::new(self, table, mode))
    }

    async fn open_existing(&self, table: TableName, mode: Mode) -> Result<OutboxStore, OpenError> {
        check_version(self).await?;
        for migrator in DIALECT.of_outbox(&table, mode) {
            let failed = |error| store_error("read the history of the outbox", error);
            let mut connection = Pooled::acquire(self).await.map_err(failed)?;
            let found = applied(&mut connection, &migrator).await.map_err(failed)?;
            connection.finish();
            check_current(&migrator, &table, &found)?;
        }
        Ok(OutboxStore::new(self, table, mode))
    }
}

async fn check_version(pool: &MySqlPool) -> Result<(), OpenError> {
    let failed = |error| store_error("open the outbox", error);
    let mut connection = Pooled::acquire(pool).await.map_err(failed)?;
    let version = sqlx::query_scalar("SELECT VERSION()").fetch_one(&mut *connection).await;
    let version: String = version.map_err(failed)?;
    connection.finish();
    if is_too_old(&version) {
        let remedy = "use MySQL 8.0.16, MariaDB 10.6 or later".to_owned();
        return Err(OpenError::Unsuitable { problem: format!("database server is {version}"), remedy });
    }
    Ok(())
}

/// True if the server has no CHECK constraints or no `JSON_TABLE`.
fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let found = (next(), next(), next());
    match version.contains("MariaDB") {
        true => found < (10, 6, 0),
        false => found < (8, 0, 16),
    }
}

pub(super) async fn migrate(pool: &MySqlPool, table: &TableName, migrator: &Migrator) -> Result<(), OpenError> {
    let failed = |error| store_error("read the history of the outbox", error);
    // If this fails or is cancelled, the connection is closed, which also releases its lock.
    let mut connection = Pooled::acquire(pool).await.map_err(failed)?;
    let found = applied(&mut connection, migrator).await.map_err(failed)?;
    if schema_of(&found, migrator).fit == Fit::Works {
        connection.finish();
        return Ok(());
    }
    // MySQL creates tables outside of transactions, and the lock that sqlx uses has no effect on MariaDB. So this takes
    // a lock.
    let name = sqlx::query_scalar("SELECT CONCAT(LEFT(SHA1(DATABASE()), 12), ':', ?)").bind(table.as_str());
    let name: String = name.fetch_one(&mut *connection).await.map_err(failed)?;
    let lock = sqlx::query("SELECT GET_LOCK(?, 3600)").bind(&name).execute(&mut *connection);
    lock.await.map_err(failed)?;
    let found = applied(&mut connection, migrator).await.map_err(failed)?;
    // `run_direct` is `run` on one connection. It must be the connection that has the lock: a pool may have only one.
    let brought_up = bring_up(migrator, table, &found, migrator.run_direct(None, &mut *connection, false)).await;
    let unlock = sqlx::query("SELECT RELEASE_LOCK(?)").bind(&name).execute(&mut *connection);
    unlock.await.map_err(failed)?;
    connection.finish();
    brought_up
}

/// The migrations that succeeded.
async fn applied(connection: &mut MySqlConnection, migrator: &Migrator) -> Result<Vec<Applied>, sqlx::Error> {
    // The table does not exist, or this user has no right to know.
    const NO_SUCH_TABLE: [u16; 2] = [1146, 1142];
    let rows = AssertSqlSafe(format!("SELECT version, description FROM {} WHERE success", migrator.table_name));
    match sqlx::query_as::<_, (i64, String)>(rows).fetch_all(connection).await {
        Err(error) if number(&error).is_some_and(|number| NO_SUCH_TABLE.contains(&number)) => Ok(Vec::new()),
        rows => Ok(rows?.into_iter().map(|(number, description)| Applied { number, description, at: None }).collect()),
    }
}

impl OutboxStore {
    fn new(pool: &MySqlPool, table: TableName, mode: Mode) -> Self {
        let [claims, settlements, renewals] = [(); 3].map(|()| Session::beside(pool));
        Self { pool: pool.clone(), claims, settlements, renewals, table, mode }
    }

    /// Fills in the name of the table, the database's clock, and which rows are unfinished.
    fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(fill(template, &self.table, self.mode))
    }

    /// A transaction for an operator, on a connection of the service's pool.
    async fn transaction(&self) -> Result<Pooled, sqlx::Error> {
        Pooled::begin(&self.pool, BEGIN).await
    }

    /// A connection for one statement of an operator.
    async fn connection(&self) -> Result<Pooled, sqlx::Error> {
        Pooled::acquire(&self.pool).await
    }
}

fn fill(template: &str, table: &TableName, mode: Mode) -> String {
    let unfinished = match mode {
        Mode::Ordered(DeadHead::Skip) => "pending = 1",
        _ => "unfinished = 1",
    };
    let filled = migrations::fill(&template.replace("{rows}", ROWS), table).replace("{now}", NOW);
    filled.replace("{unfinished}", unfinished)
}

/// The numbers of rows as the JSON array that [`ROWS`] binds.
fn list(rows: &[i64]) -> String {
    let mut list = String::with_capacity(rows.len() * 8 + 2);
    for row in rows {
        list.push(if list.is_empty() { '[' } else { ',' });
        list.push_str(&row.to_string());
    }
    match list.is_empty() {
        true => "[]".to_owned(),
        false => list + "]",
    }
}

impl Store for OutboxStore {
    fn table(&self) -> &TableName {
        &self.table
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    /// MySQL cannot notify other processes.
    fn notifier(&self) -> Option<&dyn Notifier> {
        None
    }

    fn runs_on_own_thread(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_without_constraints_or_tables_of_json_are_too_old() {
        for old in ["5.7.44-log", "8.0.15", "10.5.23-MariaDB-log", "5.5.5"] {
            assert!(is_too_old(old), "{old}");
        }
        for good in [
            "8.0.16",
            "8.4.2-commercial",
            "9.1.0",
            "10.6.0-MariaDB",
            "11.4.3-MariaDB-ubu2404",
            "10.11.19-MariaDB-0+deb12u1",
        ] {
            assert!(!is_too_old(good), "{good}");
        }
    }

    #[test]
    fn a_list_is_an_array() {
        assert_eq!([list(&[]), list(&[-7]), list(&[1, 22])], ["[]", "[-7]", "[1,22]"]);
    }
}

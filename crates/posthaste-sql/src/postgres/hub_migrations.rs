use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::StoreError;
use posthaste_core::hub_store::{Fit, Migration, Migrations, OpenError, Schema, TableRows};
use sqlx::migrate::{MigrateError, Migration as Step, Migrator};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool};
use tokio::time::{Instant, sleep};

use super::HubDatabase;
use super::errors::{doing, is_lock_conflict, store_error};
use super::migrations::{DIALECT, applied, check_encoding, exists};
use crate::migrations::{apply, deleted_tables, list, missing, newer, newest, revert, schema_of};

/// The migration that creates the outbox table.
const OUTBOX: i64 = 6;

/// The processes that migrate a database run one after the other: each first gets the advisory lock with this number.
const TRY_LOCK: &str = "SELECT pg_try_advisory_lock(7238017094312550)";
/// How long a process waits before it tries again to get that lock.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// How long a statement of a migration may wait for a lock. All later statements on the table wait behind it, so this is
/// how long a migration can stop a busy table. Afterwards it lets them pass, and tries again.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '2s'";
/// For a migration that builds an index concurrently. It waits until all transactions have ended that may not know of the
/// index, and others do not wait for it.
const NO_LOCK_TIMEOUT: &str = "SET lock_timeout = 0";

/// The index of this name, if the process that was building it was killed. IF NOT EXISTS would take it for the index.
const UNFINISHED: &str = "SELECT EXISTS (SELECT 1 FROM pg_index WHERE indexrelid = to_regclass($1) AND NOT indisvalid)";
const CONCURRENTLY: &str = "CREATE INDEX CONCURRENTLY IF NOT EXISTS ";

const PASSING: Duration = Duration::from_secs(1);
/// How long a migration is tried again.
const PATIENCE: Duration = Duration::from_secs(120);

/// The schema that was just migrated, line by line as [`CATALOG`] reads it.
const EXPECTED: &str = include_str!("../../migrations/postgres/hub/schema.txt");

/// The tables of the schema that has the history, or of the one in which it would be created.
const CATALOG: &str = "
    WITH place AS (
        SELECT coalesce((SELECT relnamespace FROM pg_class WHERE oid = to_regclass('posthaste_migration')),
                        current_schema()::regnamespace::oid) AS id
    ), tables AS (
        SELECT oid AS id, relname AS name FROM pg_class, place WHERE relnamespace = place.id AND relkind IN ('r', 'p')
    )
    SELECT 'column ' || name || '.' || attname || ' ' || format_type(atttypid, atttypmod)
        || CASE WHEN attnotnull THEN ' not null' ELSE '' END AS line
    FROM tables JOIN pg_attribute ON attrelid = tables.id WHERE attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT 'index ' || name || '.' || relname || CASE WHEN indisvalid THEN ' valid' ELSE ' not valid' END
    FROM tables JOIN pg_index ON indrelid = tables.id JOIN pg_class ON pg_class.oid = indexrelid
    UNION ALL
    SELECT 'trigger ' || name || '.' || tgname || CASE WHEN tgenabled = 'D' THEN ' disabled' ELSE ' enabled' END
    FROM tables JOIN pg_trigger ON tgrelid = tables.id WHERE NOT tgisinternal
    UNION ALL
    SELECT 'function ' || proname || '(' || pg_get_function_identity_arguments(pg_proc.oid) || ')'
    FROM pg_proc, place WHERE pronamespace = place.id";

#[async_trait]
impl Migrations for HubDatabase {
    async fn schema(&self) -> Result<Schema, StoreError> {
        schema(self.database().pool()).await
    }

    async fn list(&self) -> Result<Vec<Migration>, StoreError> {
        let migrator = DIALECT.hub();
        Ok(list(&migrator, &applied(self.database().pool(), &migrator).await?))
    }

    async fn up(&self, to: i64) -> Result<(), OpenError> {
        up(self.database().pool(), to).await
    }

    async fn down(&self, to: i64) -> Result<(), OpenError> {
        let pool = self.database().pool();
        let schema = schema(pool).await?;
        if schema.found > Some(schema.known) {
            return Err(newer(schema));
        }
        run(pool, DIALECT.hub(), Direction::Down(to)).await
    }

    async fn tables_above(&self, to: i64) -> Result<Vec<TableRows>, StoreError> {
        let pool = self.database().pool();
        let count = async {
            let mut tables = Vec::new();
            for table in deleted_tables(&DIALECT.hub(), to) {
                if exists(pool, &table).await? {
                    let rows = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
                    tables.push(TableRows { rows: sqlx::query_scalar(rows).fetch_one(pool).await?, table });
                }
            }
            Ok(tables)
        };
        doing("count the rows of the tables", count).await
    }

    async fn missing(&self) -> Result<Vec<String>, StoreError> {
        Ok(missing(EXPECTED, &self.catalog().await?))
    }
}

impl HubDatabase {
    /// The tables, columns, indexes, triggers and functions of the database, one a line.
    pub async fn catalog(&self) -> Result<Vec<String>, StoreError> {
        let lines = sqlx::query_scalar(CATALOG).fetch_all(self.database().pool()).await;
        let mut lines: Vec<String> = lines.map_err(|error| store_error("read the catalog of the database", error))?;
        lines.sort();
        Ok(lines)
    }
}

/// Brings the tables of a hub up to date. A user without the right to create tables may call it if they are.
pub async fn migrate_hub(pool: &PgPool) -> Result<(), OpenError> {
    check_encoding(pool).await?;
    up(pool, newest(&DIALECT.hub())).await
}

async fn up(pool: &PgPool, to: i64) -> Result<(), OpenError> {
    let schema = schema(pool).await?;
    match schema.fit {
        Fit::Works => Ok(()),
        Fit::TooNew => Err(newer(schema)),
        Fit::Behind => run(pool, DIALECT.hub(), Direction::Up(to)).await,
    }
}

async fn schema(pool: &PgPool) -> Result<Schema, StoreError> {
    let migrator = DIALECT.hub();
    Ok(schema_of(&applied(pool, &migrator).await?, &migrator))
}

#[derive(Clone, Copy)]
enum Direction {
    Up(i64),
    Down(i64),
}

/// Runs migrations on a connection of their own. The end of the connection releases its locks, so a process that crashes
/// leaves none. Each migration is a transaction, so the next process continues after the last one that was committed.
async fn run(pool: &PgPool, mut migrator: Migrator, direction: Direction) -> Result<(), OpenError> {
    let failed = |error| store_error("migrate the database", error);
    let mut connection = pool.connect_options().connect().await.map_err(failed)?;
    lock(&mut connection).await.map_err(failed)?;
    // That of sqlx waits in a statement, and the whole database would wait for that statement to build an index
    // concurrently. It would also count as waiting for a lock.
    migrator.set_locking(false);
    let end = Instant::now() + PATIENCE;
    let result = loop {
        match migrate(&mut connection, &migrator, direction).await {
            Err(error) if is_conflict(&error) && Instant::now() < end => {
                tracing::warn!("a migration waits for a table that is in use; trying again");
                sleep(PASSING).await;
            }
            result => break result,
        }
    };
    // The lock ends with the connection, however it ends.
    let _ = connection.close().await;
    result.map_err(|error| match error {
        // Another process was faster, and newer.
        MigrateError::VersionMissing(found) => OpenError::NewerSchema { found, known: newest(&migrator) },
        error => OpenError::Migration(error.into()),
    })
}

async fn lock(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let mut waits = false;
    while !sqlx::query_scalar::<_, bool>(TRY_LOCK).fetch_one(&mut *connection).await? {
        if !waits {
            tracing::info!("another process migrates the database: waiting for it");
        }
        waits = true;
        sleep(LOCK_PAUSE).await;
    }
    Ok(())
}

async fn migrate(connection: &mut PgConnection, migrator: &Migrator, direction: Direction) -> Result<(), MigrateError> {
    sqlx::raw_sql(LOCK_TIMEOUT).execute(&mut *connection).await?;
    match direction {
        Direction::Up(to) => {
            let outbox = exists(&mut *connection, "outbox_event").await?.then_some(OUTBOX);
            let alone = |migration: &&Step| migration.no_tx && migration.migration_type.is_up_migration();
            for concurrent in migrator.iter().filter(alone).filter(|concurrent| concurrent.version <= to) {
                apply(connection, migrator, concurrent.version - 1, outbox).await?;
                sqlx::raw_sql(NO_LOCK_TIMEOUT).execute(&mut *connection).await?;
                drop_unfinished_index(connection, concurrent).await?;
                apply(connection, migrator, concurrent.version, outbox).await?;
                sqlx::raw_sql(LOCK_TIMEOUT).execute(&mut *connection).await?;
            }
            apply(connection, migrator, to, outbox).await
        }
        Direction::Down(to) => {
            revert(connection, migrator, to).await?;
            if to == 0 {
                let history = AssertSqlSafe(format!("DROP TABLE {}", migrator.table_name));
                sqlx::raw_sql(history).execute(&mut *connection).await?;
            }
            Ok(())
        }
    }
}

async fn drop_unfinished_index(connection: &mut PgConnection, migration: &Step) -> Result<(), sqlx::Error> {
    let statement = migration.sql.as_str().split_once(CONCURRENTLY);
    let Some(index) = statement.and_then(|(_, statement)| statement.split_whitespace().next()) else { return Ok(()) };
    if sqlx::query_scalar(UNFINISHED).bind(index).fetch_one(&mut *connection).await? {
        let drop = AssertSqlSafe(format!("DROP INDEX CONCURRENTLY {index}"));
        sqlx::raw_sql(drop).execute(connection).await?;
    }
    Ok(())
}

/// True if another transaction had a lock that the migration needs.
fn is_conflict(error: &MigrateError) -> bool {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => is_lock_conflict(error),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use posthaste_backend_tests::servers;
    use sqlx::Executor;

    use super::*;
    use crate::migrations::{Numbered, migrator};

    const STEPS: &[Numbered] = &[
        Numbered {
            name: "0001_table",
            up: "CREATE TABLE big (id bigint);",
            down: "DROP TABLE big;",
            compatible_with: None,
        },
        Numbered {
            name: "0002_index",
            up: "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS big_id ON big (id);",
            down: "DROP INDEX big_id;",
            compatible_with: Some(1),
        },
        Numbered {
            name: "0003_column",
            up: "ALTER TABLE big ADD COLUMN more text;",
            down: "ALTER TABLE big DROP COLUMN more;",
            compatible_with: Some(2),
        },
    ];

    fn steps() -> Migrator {
        migrator(STEPS, "steps".to_owned(), str::to_owned)
    }

    const VALID: &str = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('big_id')";

    /// Processes that migrate at once do not wait for each other in a statement, for which the index would have to wait.
    #[tokio::test(flavor = "multi_thread")]
    async fn an_index_is_built_concurrently_and_again_after_its_process_was_killed() {
        let pool = PgPool::connect(&servers::postgres().await).await.unwrap();
        run(&pool, steps(), Direction::Up(1)).await.unwrap();
        // The index waits for this transaction, and so leaves an index that is not valid when it is ended.
        let mut reader = pool.begin().await.unwrap();
        reader.execute("LOCK TABLE big IN ROW EXCLUSIVE MODE").await.unwrap();
        let killed = tokio::spawn({
            let pool = pool.clone();
            async move { run(&pool, steps(), Direction::Up(3)).await }
        });
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE query LIKE '%CONCURRENTLY%' AND wait_event_type = 'Lock' AND datname = current_database()
                      AND pid <> pg_backend_pid()";
        while sqlx::query(kill).fetch_all(&pool).await.unwrap().is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
        killed.await.unwrap().unwrap_err();
        assert_eq!(sqlx::query_scalar(VALID).fetch_optional(&pool).await.unwrap(), Some(false));
        reader.commit().await.unwrap();
        let all = (0..4).map(|_| run(&pool, steps(), Direction::Up(3)));
        futures_util::future::join_all(all).await.into_iter().for_each(|done| done.unwrap());
        assert_eq!(sqlx::query_scalar(VALID).fetch_optional(&pool).await.unwrap(), Some(true));
        run(&pool, steps(), Direction::Down(0)).await.unwrap();
    }
}

//! The laws of the stores of a hub on a newer schema that is compatible: what a server of this release does after a server
//! of the next release used the file. The newer schema has additional columns in every table.

use async_trait::async_trait;
use posthaste_backend_tests::hub_laws::HubHarness;
use posthaste_core::hub_store::{HubDatabase as _, HubOptions, HubStores};
use posthaste_sql::sqlite::HubDatabase;
use sqlx::AssertSqlSafe;

use crate::support::File;

const NEWER: &str = "
    INSERT INTO posthaste_migration (version, description, success, checksum, execution_time)
    SELECT max(version) + 1, 'newer (compatible with ' || max(version) || ')', true, x'00', -1 FROM posthaste_migration;
    INSERT INTO outbox_event_migration (version, description, success, checksum, execution_time)
    SELECT max(version) + 1, 'newer (compatible with ' || max(version) || ')', true, x'00', -1
    FROM outbox_event_migration;";

const ADD_COLUMNS: &str = "
    SELECT group_concat(format(
        'ALTER TABLE %s ADD COLUMN newer_text TEXT; ALTER TABLE %s ADD COLUMN newer_number INTEGER NOT NULL DEFAULT 7;',
        name, name), ' ')
    FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
        AND name NOT LIKE '%\\_migration' ESCAPE '\\'";

struct NewerHub(File);

#[async_trait]
impl HubHarness for NewerHub {
    async fn start() -> Self {
        let file = File::new();
        let database = HubDatabase::open_shared(&file.url()).await.unwrap();
        database.migrate().await.unwrap();
        database.close().await;
        let columns: String = file.ask(ADD_COLUMNS).await;
        sqlx::raw_sql(AssertSqlSafe(format!("{NEWER}{columns}"))).execute(&file.pool().await).await.unwrap();
        Self(file)
    }

    /// Opens without the lock of the file, so that one test can simulate several processes.
    async fn open(&self, options: HubOptions) -> HubStores {
        let database = HubDatabase::open_shared(&self.0.url()).await.unwrap();
        database.migrate().await.unwrap();
        database.open(options).await.unwrap()
    }
}

posthaste_backend_tests::hub_laws!(NewerHub);

//! The laws of the stores of a hub on a newer schema that is compatible: what a server of this release does while servers
//! of the next release run beside it. The newer schema has additional columns in every table.

use async_trait::async_trait;
use posthaste_backend_tests::hub_laws::HubHarness;
use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{HubDatabase as _, HubOptions, HubStores};
use posthaste_sql::postgres::{HubDatabase, MIN_CONNECTIONS};
use sqlx::Executor;

const NEWER: &str = "
    INSERT INTO posthaste_migration (version, description, success, checksum, execution_time)
    SELECT max(version) + 1, 'newer (compatible with ' || max(version) || ')', true, '\\x00', -1 FROM posthaste_migration;
    INSERT INTO outbox_event_migration (version, description, success, checksum, execution_time)
    SELECT max(version) + 1, 'newer (compatible with ' || max(version) || ')', true, '\\x00', -1
    FROM outbox_event_migration;
    DO $$
    DECLARE name text;
    BEGIN
        FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename NOT LIKE '%\\_migration' LOOP
            EXECUTE format(
                'ALTER TABLE %I ADD COLUMN newer_text text, ADD COLUMN newer_number bigint NOT NULL DEFAULT 7', name);
        END LOOP;
    END $$";

struct NewerHub(String);

#[async_trait]
impl HubHarness for NewerHub {
    async fn start() -> Self {
        let url = servers::postgres().await;
        let database = HubDatabase::open(&url, MIN_CONNECTIONS).await.unwrap();
        database.migrate().await.unwrap();
        database.database().pool().execute(NEWER).await.unwrap();
        database.close().await;
        Self(url)
    }

    async fn open(&self, options: HubOptions) -> HubStores {
        let database = HubDatabase::open(&self.0, MIN_CONNECTIONS).await.unwrap();
        database.migrate().await.unwrap();
        database.open(options).await.unwrap()
    }
}

posthaste_backend_tests::hub_laws!(NewerHub);

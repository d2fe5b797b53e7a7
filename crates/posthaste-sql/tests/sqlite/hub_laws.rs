//! The laws of the stores of a hub, on SQLite.

use async_trait::async_trait;
use posthaste_backend_tests::hub_laws::HubHarness;
use posthaste_core::hub_store::{HubDatabase as _, HubOptions, HubStores};
use posthaste_sql::sqlite::HubDatabase;

use crate::support::File;

struct SqliteHub(File);

#[async_trait]
impl HubHarness for SqliteHub {
    async fn start() -> Self {
        Self(File::new())
    }

    /// Opens without the lock of the file, so that one test can simulate several processes.
    async fn open(&self, options: HubOptions) -> HubStores {
        let database = HubDatabase::open_shared(&self.0.url()).await.unwrap();
        database.migrate().await.unwrap();
        database.open(options).await.unwrap()
    }
}

posthaste_backend_tests::hub_laws!(SqliteHub);

//! The laws of the stores of a hub, on PostgreSQL.

use async_trait::async_trait;
use posthaste_backend_tests::hub_laws::HubHarness;
use posthaste_backend_tests::servers;
use posthaste_core::hub_store::{HubDatabase as _, HubOptions, HubStores};
use posthaste_sql::postgres::{HubDatabase, MIN_CONNECTIONS};

struct PostgresHub(String);

#[async_trait]
impl HubHarness for PostgresHub {
    async fn start() -> Self {
        Self(servers::postgres().await)
    }

    async fn open(&self, options: HubOptions) -> HubStores {
        let database = HubDatabase::open(&self.0, MIN_CONNECTIONS).await.unwrap();
        database.migrate().await.unwrap();
        database.open(options).await.unwrap()
    }
}

posthaste_backend_tests::hub_laws!(PostgresHub);

//! The tables of the built-in Schema Registry on PostgreSQL.

use std::sync::Arc;

use async_trait::async_trait;
use posthaste_backend_tests::hub_laws::schemas::SchemaHarness;
use posthaste_core::hub_store::SchemaStore;
use posthaste_sql::postgres::{SchemaTables, migrate_hub};

use crate::support::Postgres;

struct Server(Postgres);

impl Server {
    async fn start() -> Self {
        let postgres = Postgres::start().await;
        migrate_hub(&postgres.pool).await.unwrap();
        Self(postgres)
    }
}

#[async_trait]
impl SchemaHarness for Server {
    async fn open_schemas(&self) -> Arc<dyn SchemaStore> {
        Arc::new(SchemaTables::new(&self.0.pool))
    }
}

posthaste_backend_tests::schema_laws!(Server::start().await);

#[tokio::test]
async fn the_hub_migrates_down_to_an_empty_database_and_up_again() {
    const DOWN: &str = concat!(
        include_str!("../../migrations/postgres/hub/0002_schemas.down.sql"),
        include_str!("../../migrations/postgres/hub/0001_log.down.sql"),
        "DELETE FROM posthaste_migration;"
    );
    let Server(postgres) = Server::start().await;
    postgres.execute(DOWN).await;
    let left = "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class
                WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'";
    assert_eq!(postgres.ask::<String>(left).await, "posthaste_migration");
    migrate_hub(&postgres.pool).await.unwrap();
    migrate_hub(&postgres.pool).await.unwrap();
}

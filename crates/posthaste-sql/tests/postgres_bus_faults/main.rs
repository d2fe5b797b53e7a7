//! Faults of PostgreSQL and of the members of the groups that read the built-in bus on it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_backend_tests::bus_faults::{Address, Done, FaultyBus, PARTITIONS};
use posthaste_backend_tests::servers::{self, CrashableServer, Cutter};
use posthaste_core::Progress;
use posthaste_core::bus::Bus;
use posthaste_core::log::LogOptions;
use posthaste_sql::postgres::{Log, LogTables, migrate_hub};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, PgConnection, PgPool};

posthaste_backend_tests::bus_faults!(Postgres);

struct Postgres;

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(4).connect(url).await.unwrap()
}

#[async_trait]
impl FaultyBus for Postgres {
    const ACKS_ARE_DURABLE: bool = true;

    async fn shared() -> Address {
        let url = servers::postgres().await;
        migrate_hub(&pool(&url).await).await.unwrap();
        Address::of(url)
    }

    async fn start() -> (CrashableServer, Cutter) {
        let server = servers::Postgres::start().await;
        migrate_hub(&pool(server.url()).await).await.unwrap();
        let cutter = Cutter::to(server.url()).await;
        (server, cutter)
    }

    async fn open(address: &Address, lease: Duration) -> Arc<dyn Bus> {
        let options = LogOptions { partitions: PARTITIONS, lease, ..LogOptions::default() };
        Arc::new(Log::new(LogTables::new(pool(&address.url).await), options))
    }

    async fn done(address: &Address) -> Done {
        const DONE: &str = "SELECT partition, watermark, completed FROM log_group
            JOIN log_partition ON id = partition_id WHERE group_name = $1";
        let mut connection = PgConnection::connect(&address.url).await.unwrap();
        let done = sqlx::query_as::<_, (i32, i64, String)>(DONE).bind(address.group());
        let done = done.fetch_all(&mut connection).await.unwrap();
        let progress = |(partition, watermark, completed): (i32, i64, String)| {
            (partition as u32, Progress::decode(watermark, &completed).unwrap())
        };
        Done(done.into_iter().map(progress).collect())
    }
}

//! The use of the connections of one file.

use std::sync::Arc;
use std::time::Duration;

use posthaste_backend_tests::hub_laws::dead_letters::dead_letter;
use posthaste_core::bus::{Bus, Record, Topics};
use posthaste_core::hub_store::{
    BusInspector, DeadLetterFilter, DeadLetterQueries, DeadLetterReplays, DeadLetterSource, DeadLetterStatus,
    DefinitionStore, PageRequest, QuarantineStore, Registry, SubscriptionFilter, SubscriptionStore,
};
use posthaste_core::log::LogOptions;
use posthaste_core::outbox::{Mode, OperatorStore, Reader};
use posthaste_core::{FaultKind, Source};
use posthaste_sql::sqlite::{DeadLetterTable, Log, LogTables, RegistryTables};
use sqlx::sqlite::{Sqlite, SqlitePool};

use crate::support::{File, LEASE, event, outbox};

/// Acquires every connection of the pool, so that no other task gets one.
async fn all_of(pool: &SqlitePool) -> Vec<sqlx::pool::PoolConnection<Sqlite>> {
    let mut held = Vec::new();
    for _ in 0..pool.options().get_max_connections() {
        held.push(pool.acquire().await.unwrap());
    }
    held
}

#[tokio::test]
async fn operator_queries_and_claims_use_separate_connections() {
    let file = File::new();
    let database = file.open().await;
    database.migrate_hub().await.unwrap();
    let outbox = outbox(&database, Reader::Channels, Mode::SingleNode).await;
    let (letters, registry) = (DeadLetterTable::new(database.clone()), RegistryTables::new(database.clone()));
    let source = DeadLetterSource::new(Arc::new(letters.clone()), LEASE);
    let log = Log::new(LogTables::new(database.clone()), LogOptions::default());
    outbox.store().ingest(vec![event("1", "t", "{}")]).await.unwrap();
    source.insert(vec![dead_letter("1")]).await.unwrap();
    let value = bytes::Bytes::from_static(b"value");
    let record = Record { topic: "topic".into(), route: 0, key: "1".to_owned(), value, headers: Vec::new() };
    log.publish(vec![record]).await.remove(0).unwrap();

    let operator_connections = all_of(database.operators()).await;
    let pipeline = async {
        assert_eq!(outbox.pending_types().await.unwrap(), ["t"]);
        assert_eq!(outbox.channel_source("t").claim(1).await.unwrap().items.len(), 1);
        let consumer = log.subscribe("group", Topics::Prefix(String::new())).await.unwrap();
        assert_eq!(consumer.fetch(1).await.unwrap().len(), 1);
        assert_eq!(source.claim(1).await.unwrap().items.len(), 1);
        assert_eq!(registry.version().await.unwrap(), registry.load_active().await.unwrap().0);
    };
    tokio::time::timeout(Duration::from_secs(20), pipeline).await.expect("the pipeline waits for operator queries");
    drop(operator_connections);

    let _pipeline_connections = all_of(database.readers()).await;
    let operator_queries = async {
        let id = letters.list(&DeadLetterFilter::default()).await.unwrap().items.remove(0).id;
        assert!(letters.get(&id).await.unwrap().is_some());
        assert_eq!(letters.of_event("event-1").await.unwrap().len(), 1);
        assert_eq!(letters.depth_by_status().await.unwrap()[0], (DeadLetterStatus::New, 1));
        assert_eq!(letters.replay_results("unknown").await.unwrap().pending, 0);
        assert_eq!(
            (log.store().records_of("1").await.unwrap().len(), log.store().topics().await.unwrap().len()),
            (1, 1)
        );
        assert!(log.store().counts().await.unwrap().is_empty());
        let page = PageRequest { after: None, page: 0, size: 10 };
        assert_eq!(registry.definitions(page.clone()).await.unwrap().total, 0);
        assert_eq!(registry.subscriptions(&SubscriptionFilter::default(), page).await.unwrap().total, 0);
        assert!(registry.definition("unknown").await.unwrap().is_none());
        assert!(registry.subscription("unknown").await.unwrap().is_none());
        assert!(outbox.store().find("1").await.unwrap().is_some());
    };
    tokio::time::timeout(Duration::from_secs(20), operator_queries)
        .await
        .expect("operator queries wait for the pipeline");
}

#[tokio::test]
async fn a_check_fails_if_the_database_cannot_be_written_to() {
    let file = File::new();
    let database = file.open().await;
    database.check().await.unwrap();
    database.close().await;
    assert_eq!(database.check().await.unwrap_err().kind(), FaultKind::Transient);
}

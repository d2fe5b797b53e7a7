//! Only one process at a time can use a hub's file.

use posthaste_backend_tests::hub_laws::dead_letters::dead_letter;
use posthaste_core::Source;
use posthaste_core::hub_store::{DeadLetterSource, HubDatabase as _, HubOptions, OpenError};
use posthaste_sql::sqlite::HubDatabase;

use crate::support::{File, LEASE};

const OPTIONS: HubOptions = HubOptions { lease: LEASE, max_channels: 10, partitions: 1, is_ordered: false };

#[tokio::test]
async fn a_second_process_is_refused_until_the_first_has_closed() {
    let file = File::new();
    let first = HubDatabase::open(&file.url()).await.unwrap();
    assert!(HubDatabase::is_in_use(&file.path()).unwrap());
    assert!(matches!(HubDatabase::open(&file.url()).await, Err(OpenError::InUse { .. })));
    first.close().await;
    assert!(!HubDatabase::is_in_use(&file.path()).unwrap());
    HubDatabase::open(&file.url()).await.unwrap().close().await;
}

#[tokio::test]
async fn an_exclusive_process_voids_the_leases_of_the_previous_process() {
    let file = File::new();
    let killed = HubDatabase::open(&file.url()).await.unwrap();
    killed.migrate().await.unwrap();
    let stores = killed.open(OPTIONS).await.unwrap();
    let source = DeadLetterSource::new(stores.dead_letters, LEASE);
    source.insert(vec![dead_letter("1")]).await.unwrap();
    assert_eq!(source.claim(10).await.unwrap().items.len(), 1);
    // The operating system unlocks the file of a process that was killed.
    drop(killed);

    let shared = HubDatabase::open_shared(&file.url()).await.unwrap();
    let source = DeadLetterSource::new(shared.open(OPTIONS).await.unwrap().dead_letters, LEASE);
    assert!(source.claim(10).await.unwrap().items.is_empty(), "a process without the lock waits for the lease");
    let next = HubDatabase::open(&file.url()).await.unwrap();
    let stores = next.open(HubOptions { lease: LEASE / 2, ..OPTIONS }).await.unwrap();
    let source = DeadLetterSource::new(stores.dead_letters, LEASE);
    assert_eq!(source.claim(10).await.unwrap().items.len(), 1);
}

//! A service that blocks every thread of its runtime, or uses every connection of its pool, for longer than a lease.

use std::time::Duration;

use posthaste::{Event, Listeners, Mode, Outbox};

use crate::harness::{Calls, Database, Harness, MODES, all_done, event_of, on_every_database, write_plain, writer_of};

on_every_database! {
    listeners_that_block_every_thread_lose_no_lease,
    an_exhausted_connection_pool_loses_no_lease,
}

/// Longer than a busy machine pauses the test.
const SHORT_LEASE: Duration = Duration::from_secs(5);
const LONGER_THAN_A_LEASE: Duration = Duration::from_millis(6_500);
/// As many as the threads of the service, so that all deliveries run at once.
const EVENTS: usize = 2;

/// A second node, which claims every row whose lease the first node loses.
async fn rival<H: Harness>(db: &H, mode: Mode, table: &str, calls: &Calls) -> Outbox<H::Store> {
    let builder = Outbox::new(db.pool().await).mode(mode).table(table).lease(SHORT_LEASE);
    builder.poll_interval(Duration::from_millis(50)).listeners(calls.listeners()).start().await.unwrap()
}

async fn listeners_that_block_every_thread_lose_no_lease<H: Database>(db: H) {
    for mode in MODES {
        let table = format!("blocked_{}", mode.word());
        let events: Vec<Event> = (0..EVENTS).map(|number| event_of(&number.to_string())).collect();
        let ids = write_plain(&db, &writer_of(&db, &table).await, &events).await;
        // The service has a runtime with few threads, and listeners that block all of them.
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(EVENTS).enable_all().build().unwrap();
        let calls = Calls::default();
        let (pool, blocking) = (db.pool().await, calls.clone());
        let listeners = Listeners::new().on_aggregate("a", "t", move |event| {
            let calls = blocking.clone();
            async move {
                calls.add(event);
                std::thread::sleep(LONGER_THAN_A_LEASE);
            }
        });
        let builder = Outbox::new(pool).mode(mode).table(&table).lease(SHORT_LEASE).listeners(listeners.unwrap());
        let blocked = runtime.spawn(builder.start()).await.unwrap().unwrap();
        calls.wait_for(EVENTS).await;
        let rival = rival(&db, mode, &table, &calls).await;
        all_done(&rival, &ids).await;
        let counts = calls.counts();
        assert!(counts.len() == EVENTS && counts.values().all(|count| *count == 1), "{mode:?}: {counts:?}");
        runtime.spawn(async move { blocked.close().await }).await.unwrap();
        rival.close().await;
        runtime.shutdown_background();
    }
}

async fn an_exhausted_connection_pool_loses_no_lease<H: Database>(db: H) {
    for mode in MODES {
        let table = format!("exhausted_{}", mode.word());
        let calls = Calls::default();
        let pool = db.pool().await;
        let builder = Outbox::new(pool.clone()).mode(mode).table(&table).lease(SHORT_LEASE);
        let slow = calls.slow_listeners(LONGER_THAN_A_LEASE);
        let greedy = builder.poll_interval(Duration::from_millis(50)).listeners(slow).start().await.unwrap();
        let events: Vec<Event> = (0..EVENTS).map(|number| event_of(&number.to_string())).collect();
        let ids = write_plain(&db, &writer_of(&db, &table).await, &events).await;
        greedy.committed();
        calls.wait_for(EVENTS).await;
        let mut open_transactions = Vec::new();
        for _ in 0..5 {
            open_transactions.push(H::begin_plain(&pool).await);
        }
        let rival = rival(&db, mode, &table, &calls).await;
        all_done(&rival, &ids).await;
        drop(open_transactions);
        let counts = calls.counts();
        assert!(counts.len() == EVENTS && counts.values().all(|count| *count == 1), "{mode:?}: {counts:?}");
        greedy.close().await;
        rival.close().await;
    }
}

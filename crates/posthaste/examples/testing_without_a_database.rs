//! How a service tests its events without a database: `cargo run -p posthaste --example testing_without_a_database`.
//!
//! The code under test is generic over the store. In production it uses the outbox of the database. In a test it uses
//! an outbox in memory, on a clock that the test controls.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use posthaste::{Event, Outbox, OutboxStatus, Transaction, WriteError};
use posthaste_core::outbox::{OperatorStore, Store};
use posthaste_testing::{HookCall, MemoryDatabase, RecordingHook};
use tokio::sync::mpsc;

/// The code under test: an order is confirmed now, and followed up a day later.
async fn confirm<S: Store + OperatorStore>(
    outbox: &Outbox<S>,
    transaction: &mut Transaction<S>,
    order: u64,
) -> Result<(), WriteError> {
    let follow_up = Event::text("order.follow_up", order.to_string()).deliver_after(Duration::from_secs(24 * 60 * 60));
    outbox.write_all(transaction, [Event::text("order.confirmed", order.to_string()), follow_up]).await?;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    // The test does not wait for a day: time jumps to the next event that is due.
    tokio::time::pause();
    run().await
}

pub async fn run() -> Result<(), Box<dyn Error>> {
    let (database, hook) = (MemoryDatabase::new(), RecordingHook::new());
    let (sender, mut delivered) = mpsc::unbounded_channel();
    let follow_ups = sender.clone();
    let outbox = Outbox::new(database.clone())
        .hook(hook.clone())
        .listen("order.confirmed", move |order: u64, _: Arc<Event>| {
            let sent = sender.send(("confirmed", order));
            async move { sent }
        })
        .listen("order.follow_up", move |order: u64, _: Arc<Event>| {
            let sent = follow_ups.send(("followed up", order));
            async move { sent }
        })
        .start()
        .await?;

    // A rollback stores nothing, and the hook is called.
    let mut transaction = outbox.begin().await?;
    confirm(&outbox, &mut transaction, 1).await?;
    transaction.rollback().await?;
    assert!(database.rows("outbox_event").is_empty());
    assert!(matches!(hook.calls().last(), Some(HookCall::AfterRollback(events)) if events.len() == 2));

    let mut transaction = outbox.begin().await?;
    confirm(&outbox, &mut transaction, 2).await?;
    transaction.commit().await?;
    let started = tokio::time::Instant::now();
    assert_eq!(delivered.recv().await, Some(("confirmed", 2)));
    assert_eq!(delivered.recv().await, Some(("followed up", 2)));
    assert!(started.elapsed() >= Duration::from_secs(24 * 60 * 60), "a day has passed, on the test's clock");
    outbox.close().await;
    assert!(database.rows("outbox_event").iter().all(|row| row.status == OutboxStatus::Done));
    println!("both events were delivered, the second one a day later");
    Ok(())
}

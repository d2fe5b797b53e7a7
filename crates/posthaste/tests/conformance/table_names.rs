//! Table names that are reserved words of SQL.

use std::time::Duration;

use posthaste::{DeadFilter, Event, Failure, Mode, Outbox, OutboxStatus, Retention};

use crate::harness::{Calls, Harness, all_done, event_of, on_every_store, row_when, until, write, write_plain};

on_every_store! {
    a_table_may_be_named_with_a_reserved_word,
}

/// Runs every operation on a table whose name is a reserved word of SQL.
async fn a_table_may_be_named_with_a_reserved_word<H: Harness>(db: H) {
    for (name, mode) in
        [("order", Mode::ORDERED), ("user", Mode::SingleNode), ("group", Mode::MultiNode), ("table", Mode::ORDERED)]
    {
        let calls = Calls::default();
        let listeners = calls.listeners().on("bad", |_| async { Err(Failure::permanent("no", "never")) }).unwrap();
        let purge =
            Retention { done: Some(Duration::ZERO), interval: Duration::from_millis(20), ..Retention::default() };
        let builder = Outbox::new(db.pool().await).listeners(listeners).mode(mode).table(name);
        let outbox = builder.start().await.unwrap();
        let mut ids = write(&outbox, &[event_of("1"), event_of("1")]).await;
        ids.extend(write_plain(&db, &outbox, &[event_of("1")]).await);
        all_done(&outbox, &ids).await;
        assert_eq!(calls.ids().len(), 3, "{name}");

        let dead = write(&outbox, &[Event::text("bad", "{}").build().unwrap()]).await;
        row_when(&outbox, &dead[0], |row| row.status == OutboxStatus::Dead).await;
        assert_eq!(outbox.dead().count(&DeadFilter::all()).await.unwrap(), 1);
        assert!(outbox.dead().replay(&dead[0]).await.unwrap());
        row_when(&outbox, &dead[0], |row| row.status == OutboxStatus::Dead).await;
        assert_eq!(outbox.dead().list(&DeadFilter::all(), 10).await.unwrap().len(), 1);
        assert!(outbox.dead().discard(&dead[0]).await.unwrap());
        outbox.close().await;

        let purger =
            Outbox::new(db.pool().await).mode(Mode::WriterOnly).table(name).purge(purge).start().await.unwrap();
        until("everything that is done is purged", async || {
            let mut found = 0;
            for id in &ids {
                found += usize::from(purger.find(id).await.unwrap().is_some());
            }
            found == 0
        })
        .await;
        purger.close().await;
    }
}

//! The connection is lost during COMMIT, so the client cannot know if the transaction committed. Both cases must end
//! well.

use std::sync::Arc;
use std::time::Duration;

use posthaste::{Event, FaultKind, Mode, Outbox, OutboxStatus, Pool};
use posthaste_backend_tests::servers::{self, Cutter, Keep};
use posthaste_core::outbox::Store;
use posthaste_testing::{HookCall, RecordingHook};
use tokio::sync::mpsc;

/// Cuts off the commit of one transaction and commits another. Only events that are in the database are delivered, once
/// each. The hook treats the unknown outcome as a rollback.
async fn cut_off<S: Store>(pool: impl Pool<S>, cutter: &Cutter, mode: Mode, keep: Keep) {
    let committed = keep == Keep::Forwarded;
    let (delivered, mut deliveries) = mpsc::unbounded_channel();
    let hook = RecordingHook::new();
    let builder = Outbox::new(pool).mode(mode).hook(hook.clone()).poll_interval(Duration::from_millis(100));
    let outbox = builder.on("t", move |event: Arc<Event>| {
        let delivered = delivered.clone();
        async move { delivered.send(event.id().to_owned()).unwrap() }
    });
    let outbox = outbox.start().await.unwrap();
    // Claims commit, too. If the commit of a claim was cut off instead, this event is committed and the loop tries
    // again.
    let mut expected = Vec::new();
    let unknown = loop {
        let event = Event::text("t", "{}").build().unwrap();
        let mut transaction = outbox.begin().await.unwrap();
        outbox.write(&mut transaction, &event).await.unwrap();
        cutter.cut_when_sent(b"COMMIT", keep);
        let ended = transaction.commit().await;
        cutter.cut().await;
        match ended {
            Ok(()) => expected.push(event.id().to_owned()),
            Err(error) => {
                assert_eq!(error.kind(), FaultKind::OutcomeUnknown, "{}", error.chain());
                break event;
            }
        }
    };
    let known = Event::text("t", "{}").build().unwrap();
    assert!(matches!(hook.calls().last(), Some(HookCall::AfterRollback(_))));
    let mut transaction = outbox.begin().await.unwrap();
    outbox.write(&mut transaction, &known).await.unwrap();
    transaction.commit().await.unwrap();
    expected.push(known.id().to_owned());
    if committed {
        expected.push(unknown.id().to_owned());
    }
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        let next = tokio::time::timeout(Duration::from_secs(30), deliveries.recv()).await;
        seen.push(next.expect("the event is delivered in time").unwrap());
    }
    outbox.close().await;
    while let Ok(more) = deliveries.try_recv() {
        seen.push(more);
    }
    seen.sort();
    expected.sort();
    assert_eq!(seen, expected, "every event in the database is delivered once, and no other");
    let row = outbox.find(unknown.id()).await.unwrap();
    assert_eq!(row.map(|row| row.status), committed.then_some(OutboxStatus::Done));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_cut_off_on_postgres_is_delivered_only_if_it_happened() {
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        for keep in [Keep::Forwarded, Keep::Swallowed] {
            let cutter = Cutter::to(&servers::postgres().await).await;
            let pool = sqlx::PgPool::connect(cutter.url()).await.unwrap();
            cut_off(pool, &cutter, mode, keep).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_cut_off_on_mariadb_is_delivered_only_if_it_happened() {
    for mode in [Mode::SingleNode, Mode::MultiNode] {
        for keep in [Keep::Forwarded, Keep::Swallowed] {
            let cutter = Cutter::to(&servers::mariadb().await).await;
            let pool = sqlx::MySqlPool::connect(cutter.url()).await.unwrap();
            cut_off(pool, &cutter, mode, keep).await;
        }
    }
}

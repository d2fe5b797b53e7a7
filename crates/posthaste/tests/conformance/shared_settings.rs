//! All processes that read one table must agree on some settings. A process that disagrees is refused at its start.

use std::time::Duration;

use posthaste::{DeadHead, Mode, OpenError, Outbox, StartError};

use crate::harness::{Calls, Database, Harness, on_every_database, on_every_store, writer};

on_every_store! {
    a_process_with_another_lease_is_refused,
    a_process_with_another_dead_head_rule_is_refused,
    processes_that_start_at_once_agree,
    a_writer_registers_no_settings,
}

on_every_database! {
    settings_cleared_by_an_operator_are_set_by_the_next_reader,
}

const TEN: Duration = Duration::from_secs(10);
const TWENTY: Duration = Duration::from_secs(20);

/// Starts a reader in this mode with this lease, and returns the error if the start is refused. A reader that starts is
/// stopped again.
async fn refused<H: Harness>(db: &H, mode: Mode, lease: Duration) -> Option<OpenError> {
    let builder = Outbox::new(db.pool().await).listeners(Calls::default().listeners()).mode(mode).lease(lease);
    match builder.start().await {
        Ok(outbox) => {
            outbox.close().await;
            None
        }
        Err(StartError::Open(error)) => Some(error),
        Err(error) => panic!("{error}"),
    }
}

async fn a_process_with_another_lease_is_refused<H: Harness>(db: H) {
    drop(db);
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let db = H::start().await;
        assert!(refused(&db, mode, TEN).await.is_none());
        let error = refused(&db, mode, TWENTY).await.unwrap();
        assert!(matches!(error, OpenError::OtherLease { recorded: TEN, asked: TWENTY, .. }), "{error}");
        let says = error.to_string();
        for part in ["10s", "20s", "outbox_event_owner", "lease_ms"] {
            assert!(says.contains(part), "{part} in {says}");
        }
        assert!(refused(&db, mode, TEN).await.is_none(), "the refused process has changed nothing");
    }
}

async fn a_process_with_another_dead_head_rule_is_refused<H: Harness>(db: H) {
    assert!(refused(&db, Mode::Ordered(DeadHead::Skip), TEN).await.is_none());
    let error = refused(&db, Mode::Ordered(DeadHead::Block), TEN).await.unwrap();
    assert!(matches!(error, OpenError::OtherDeadHead { asked: "block", .. }), "{error}");
    let says = error.to_string();
    for part in ["rule skip", "rule block", "outbox_event_owner", "dead_head"] {
        assert!(says.contains(part), "{part} in {says}");
    }
    assert!(refused(&db, Mode::Ordered(DeadHead::Skip), TEN).await.is_none());
}

async fn processes_that_start_at_once_agree<H: Harness>(db: H) {
    let leases = [10, 11, 12, 13].map(Duration::from_secs);
    let [one, two, three, four] = leases.map(|lease| refused(&db, Mode::MultiNode, lease));
    let (one, two, three, four) = tokio::join!(one, two, three, four);
    let answers = [one, two, three, four];
    let started: Vec<Duration> =
        leases.iter().zip(&answers).filter(|(_, refused)| refused.is_none()).map(|(lease, _)| *lease).collect();
    assert_eq!(started.len(), 1, "{answers:?}");
    for error in answers.into_iter().flatten() {
        assert!(matches!(&error, OpenError::OtherLease { recorded, .. } if *recorded == started[0]), "{error}");
    }
}

async fn a_writer_registers_no_settings<H: Harness>(db: H) {
    let first = writer(&db).await;
    assert!(refused(&db, Mode::Ordered(DeadHead::Skip), TWENTY).await.is_none());
    let second = writer(&db).await;
    first.close().await;
    second.close().await;
}

/// An operator clears the registered settings to let the next start choose another lease or another dead-head rule.
async fn settings_cleared_by_an_operator_are_set_by_the_next_reader<H: Database>(db: H) {
    assert!(refused(&db, Mode::Ordered(DeadHead::Skip), TEN).await.is_none());
    db.execute("UPDATE outbox_event_owner SET lease_ms = NULL, dead_head = NULL").await;
    assert!(matches!(refused(&db, Mode::MultiNode, TEN).await, Some(OpenError::OtherMode { .. })));
    assert!(refused(&db, Mode::Ordered(DeadHead::Block), TWENTY).await.is_none(), "a refused start registers nothing");
    assert!(matches!(refused(&db, Mode::ORDERED, TEN).await, Some(OpenError::OtherLease { recorded: TWENTY, .. })));
    let other_rule = refused(&db, Mode::Ordered(DeadHead::Skip), TWENTY).await;
    assert!(matches!(other_rule, Some(OpenError::OtherDeadHead { .. })));
}

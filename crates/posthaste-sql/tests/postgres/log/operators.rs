//! What operators and retention do to the log, and bad rows.

use posthaste_backend_tests::bus_laws::BusHarness;
use posthaste_core::Progress;
use posthaste_core::bus::{Advance, Bus, Fetched, Poison, Quarantine, Topics};
use posthaste_core::hub_store::{BusInspector, OpenError, QuarantineStore, ResetTo};
use posthaste_core::log::{LogStore, Member};
use posthaste_sql::postgres::{Log, LogTables, migrate_hub};

use super::{LONG, Server, join, pool, positions, publish, record};

#[tokio::test]
async fn a_reset_moves_a_group_and_a_lost_position_is_a_backlog() {
    let server = Server::start(2, LONG).await;
    let log = server.open().await;
    publish(&log, (0..20).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(100).await.unwrap();
    consumer.ack(&positions(&fetched)).await.unwrap();
    let tables = log.store();
    assert!(tables.backlogs().await.unwrap().is_empty());
    assert_eq!(tables.reset("group", "orders", Some(1), ResetTo::Earliest).await.unwrap(), 1);
    assert_eq!(tables.reset("group", "orders", Some(7), ResetTo::Earliest).await.unwrap(), 0);
    assert_eq!(tables.reset("other", "orders", None, ResetTo::Earliest).await.unwrap(), 0);
    assert_eq!(consumer.ack(&[&fetched[0].position]).await.unwrap().len(), 1);
    let backlogs = tables.backlogs().await.unwrap();
    assert!(matches!(&backlogs[..], [backlog] if backlog.partition == 1 && !backlog.is_position_lost), "{backlogs:?}");
    server.remove_below("orders", 5).await;
    let backlogs = tables.backlogs().await.unwrap();
    assert!(matches!(&backlogs[..], [backlog] if backlog.is_position_lost), "{backlogs:?}");
    assert_eq!(tables.reset("group", "orders", None, ResetTo::Earliest).await.unwrap(), 2);
    let topics = tables.topics().await.unwrap();
    for state in &topics {
        assert_eq!((state.first_offset, state.next_offset), (5, 10));
        assert_eq!(state.groups, [("group".to_owned(), 5)]);
    }
    assert_eq!(tables.reset("group", "orders", None, ResetTo::Latest).await.unwrap(), 2);
    assert!(tables.backlogs().await.unwrap().is_empty() && tables.lag_of_groups().await.unwrap().is_empty());
}

/// The transaction of the test stands for a process that is removing records.
#[tokio::test]
async fn groups_do_not_move_to_the_earliest_record_while_records_are_removed() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    publish(&log, (0..10).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(100).await.unwrap();
    consumer.ack(&positions(&fetched)).await.unwrap();
    let mut removing = server.pool.begin().await.unwrap();
    let lock = "SELECT pg_advisory_xact_lock(hashtext('posthaste remove records'), 0)";
    sqlx::raw_sql(lock).execute(&mut *removing).await.unwrap();
    let resetting = tokio::spawn({
        let tables = log.store().clone();
        async move { tables.reset("group", "orders", None, ResetTo::Earliest).await.unwrap() }
    });
    let joining = tokio::spawn({
        let log = log.clone();
        async move { log.subscribe("new", Topics::Named(vec!["orders".to_owned()])).await.unwrap().fetch(100).await }
    });
    const WAITING: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    while server.ask(WAITING).await < 2 {
        tokio::task::yield_now().await;
    }
    sqlx::raw_sql("DELETE FROM log_record WHERE \"offset\" < 5").execute(&mut *removing).await.unwrap();
    removing.commit().await.unwrap();
    assert_eq!(resetting.await.unwrap(), 1);
    let fetched = joining.await.unwrap().unwrap();
    assert_eq!(fetched.iter().map(|fetched| fetched.position.offset).collect::<Vec<_>>(), [5, 6, 7, 8, 9]);
    let backlogs = log.store().backlogs().await.unwrap();
    assert!(backlogs.len() == 2 && backlogs.iter().all(|backlog| !backlog.is_position_lost), "{backlogs:?}");
}

#[tokio::test]
async fn progress_that_is_recorded_late_does_not_move_a_group_back() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    publish(&log, (0..10).map(|number| record("orders", number))).await;
    let consumer = join(&log, "orders").await;
    let fetched = consumer.fetch(100).await.unwrap();
    consumer.ack(&positions(&fetched)).await.unwrap();
    let owner = sqlx::query_scalar("SELECT owner FROM log_group").fetch_one(&server.pool).await.unwrap();
    let (group, topics) = ("group".to_owned(), Topics::Named(vec!["orders".to_owned()]));
    let member = Member { group, owner, topics };
    let late = Advance {
        partition_id: server.ask("SELECT partition_id FROM log_group").await,
        generation: fetched[0].position.generation,
        progress: Progress::at(3),
    };
    assert!(log.store().record(&member, &[late]).await.unwrap().is_empty());
    assert_eq!(server.ask("SELECT watermark FROM log_group").await, 10);
}

#[tokio::test]
async fn unreadable_headers_are_damage_of_one_record() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    publish(&log, (0..3).map(|number| record("orders", number))).await;
    server.execute("UPDATE log_record SET headers = '{broken' WHERE \"offset\" = 1").await;
    let fetched = join(&log, "orders").await.fetch(10).await.unwrap();
    let is_damaged: Vec<bool> = fetched.iter().map(|fetched| fetched.damage.is_some()).collect();
    assert_eq!(is_damaged, [false, true, false]);
    assert_eq!(fetched[1].headers, [("unreadable".to_owned(), "{broken".to_owned())]);
}

#[tokio::test]
async fn quarantined_texts_may_contain_any_character_and_deletions_are_counted() {
    let server = Server::start(1, LONG).await;
    let log = server.open().await;
    publish(&log, (0..3).map(|number| record("orders", number))).await;
    let fetched = join(&log, "orders").await.fetch(10).await.unwrap();
    let poison =
        |record: Fetched| Poison { reason: "no \0".to_owned(), record: Fetched { key: "\0".to_owned(), ..record } };
    let poison: Vec<Poison> = fetched.into_iter().map(poison).collect();
    log.store().quarantine("group", &poison).await.unwrap();
    server.execute("DELETE FROM quarantined_record WHERE \"offset\" < 2").await;
    let counts = log.store().counts().await.unwrap();
    assert!(matches!(&counts[..], [count] if count.records == 1), "{counts:?}");
}

#[tokio::test]
async fn hub_tables_can_be_opened_without_the_right_to_create_tables_and_not_by_an_older_program() {
    let server = Server::start(1, LONG).await;
    server
        .execute(
            "CREATE ROLE hub_without_rights LOGIN;
             REVOKE CREATE ON SCHEMA public FROM PUBLIC;
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO hub_without_rights",
        )
        .await;
    let limited = pool(&server.url.replace("postgres@", "hub_without_rights@")).await;
    migrate_hub(&limited).await.unwrap();
    let log = Log::new(LogTables::new(limited), server.options.clone());
    publish(&log, [record("orders", 0)]).await;
    assert_eq!(join(&log, "orders").await.fetch(10).await.unwrap().len(), 1);
    let newer = "UPDATE posthaste_migration SET version = 9998, description = 'future'
        WHERE version = (SELECT max(version) FROM posthaste_migration)";
    server.execute(newer).await;
    let error = migrate_hub(&server.pool).await.unwrap_err();
    assert!(matches!(error, OpenError::NewerSchema { found: 9998, .. }), "{error}");
}

//! How MariaDB executes the statements that run all the time. A plan that scans or sorts is a bug that only shows at
//! size, and one that depends on statistics is a bug that shows one night.

use posthaste_backend_tests::servers;
use posthaste_core::outbox::{DeadFilter, DeadHead, Mode, Purge, TableName};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tokio::sync::OnceCell;

use super::{claim, fill, lease, operator, settle};
use crate::mysql::migrations;

/// 100,000 rows that are pending, of ten types and a thousand keys, 100,000 that are done and 50,000 that are delayed.
const FILL: &str = "INSERT INTO outbox_event (event_type, payload, aggregate_id, status, available_at)
     SELECT CONCAT('type', seq % 10), '{}', CONCAT('key', seq % 1000), seq % 5 < 2,
         UTC_TIMESTAMP(6) + INTERVAL IF(seq % 5 = 4, 3600, 0) SECOND
     FROM seq_1_to_250000";

/// The same with a million rows that are not done.
const FILL_A_MILLION: &str = "INSERT INTO outbox_event (event_type, payload, aggregate_id, status, available_at)
     SELECT CONCAT('type', seq % 10), '{}', CONCAT('key', seq % 1000), seq % 5 < 2,
         UTC_TIMESTAMP(6) + INTERVAL IF(seq % 5 = 4, 3600, 0) SECOND
     FROM seq_1_to_1700000";

/// The rows of a quiet service: all of them are done.
const QUIET: &str = "INSERT INTO outbox_event (event_type, payload, aggregate_id, status)
     SELECT CONCAT('type', seq % 10), '{}', CONCAT('key', seq % 1000), 1 FROM seq_1_to_50000";

const ANALYZE: &str = "ANALYZE TABLE outbox_event";

/// Without an owner MariaDB would see that no row can be changed, and plan nothing.
const OWNER: &str = "INSERT INTO outbox_event_owner (reader, mode, owner, generation)
     VALUES ('dispatcher', 'single_node', 'a', 1)";

const MODES: [Mode; 4] =
    [Mode::SingleNode, Mode::MultiNode, Mode::Ordered(DeadHead::Block), Mode::Ordered(DeadHead::Skip)];

/// The table under every kind of statistics: those of an empty table, of a quiet time, and of now.
async fn tables() -> Vec<MySqlConnection> {
    /// The tests only read it, so the largest table is filled once.
    static LARGE: OnceCell<String> = OnceCell::const_new();
    let mut tables = Vec::new();
    for steps in [&[ANALYZE][..], &[ANALYZE, FILL], &[QUIET, ANALYZE, FILL]] {
        tables.push(MySqlConnection::connect(&table(steps).await).await.unwrap());
    }
    let large = LARGE.get_or_init(|| table(&[FILL_A_MILLION, ANALYZE])).await;
    tables.push(MySqlConnection::connect(large).await.unwrap());
    tables
}

/// The URL of a database with a table on which these steps ran.
async fn table(steps: &[&'static str]) -> String {
    let url = servers::mariadb().await;
    let mut connection = MySqlConnection::connect(&url).await.unwrap();
    migrations::DIALECT.outbox(&TableName::default()).run(&mut connection).await.unwrap();
    migrations::DIALECT.ordered(&TableName::default()).run(&mut connection).await.unwrap();
    for step in [OWNER, "ALTER TABLE outbox_event STATS_AUTO_RECALC = 0"].iter().chain(steps) {
        sqlx::raw_sql(*step).execute(&mut connection).await.unwrap();
    }
    url
}

/// One line for each table that the statement reads: the access type, the index and the extra steps.
async fn plan(connection: &mut MySqlConnection, mode: Mode, sql: &str, values: &[&str]) -> Vec<String> {
    let filled = fill(sql, &TableName::default(), mode);
    let mut parts = filled.split('?');
    let mut statement = format!("EXPLAIN {}", parts.next().unwrap_or_default());
    let mut values = values.iter();
    for part in parts {
        statement.push_str(values.next().expect("a value for every bind"));
        statement.push_str(part);
    }
    assert_eq!(values.next(), None, "{statement}");
    let rows = sqlx::raw_sql(AssertSqlSafe(statement)).fetch_all(connection).await.unwrap();
    let text = |row: &sqlx::mysql::MySqlRow, column: &str| {
        row.try_get::<Option<String>, _>(column).unwrap().unwrap_or_default()
    };
    rows.iter()
        .map(|row| ["table", "type", "key", "Extra"].map(|column| text(row, column)).join(" | "))
        .filter(|line| !line.starts_with(" | "))
        .collect()
}

fn assert_searches(plan: &[String], table: &str, index: &str) {
    let searched = plan.iter().any(|line| {
        let by = |access: &str| line.starts_with(&format!("{table} | {access} | {index} | "));
        by("range") || by("ref") || by("eq_ref") || by("const")
    });
    assert!(searched, "{table} by {index}: {plan:#?}");
    assert!(!plan.iter().any(|line| line.contains("filesort")), "{plan:#?}");
}

const BEGINNING: [&str; 3] = ["'1000-01-01'", "'1000-01-01'", "-9223372036854775808"];
const MIDDLE: [&str; 3] = ["UTC_TIMESTAMP(6) - INTERVAL 10 MINUTE", "UTC_TIMESTAMP(6) - INTERVAL 10 MINUTE", "100000"];
const FREE: [&str; 4] = ["30000000", "100", "'1,2,3'", "TRUE"];

#[tokio::test]
async fn a_claim_reads_its_index_in_order() {
    for mut connection in tables().await {
        for position in [BEGINNING, MIDDLE] {
            for (of_one_type, index) in [(false, "outbox_event_pending"), (true, "outbox_event_pending_of_type")] {
                let mut values = if of_one_type { vec!["'type3'"] } else { vec![] };
                values.extend(position);
                values.push("0");
                let read = [&values[..], &["500"]].concat();
                let found = plan(&mut connection, Mode::SingleNode, &claim::pending(of_one_type), &read).await;
                assert_searches(&found, "outbox_event", index);
                let lease = [&values[..], &FREE, &["500"]].concat();
                let found = plan(&mut connection, Mode::MultiNode, &claim::free(of_one_type), &lease).await;
                assert_searches(&found, "outbox_event", index);
            }
            let ready = [&position[..], &["0"], &FREE, &["500"]].concat();
            let found = plan(&mut connection, Mode::ORDERED, &claim::ready(false), &ready).await;
            assert_searches(&found, "outbox_event", "outbox_event_ready");
        }
        for mode in MODES {
            let is_ordered = matches!(mode, Mode::Ordered(_));
            for of_one_type in [false, true] {
                let mut values = if mode.leases_rows() { vec!["TRUE"] } else { vec![] };
                values.extend(of_one_type.then_some("'type3'"));
                values.push("1");
                let found = plan(&mut connection, mode, &claim::next_due(mode, of_one_type), &values).await;
                let index = match (is_ordered, of_one_type) {
                    (true, _) => "outbox_event_ready",
                    (false, false) => "outbox_event_pending",
                    (false, true) => "outbox_event_pending_of_type",
                };
                assert_searches(&found, "outbox_event", index);
            }
        }
        let unblocked = plan(&mut connection, Mode::ORDERED, operator::OLDEST_UNBLOCKED, &[]).await;
        assert_searches(&unblocked, "outbox_event", "outbox_event_ready");
        let types = plan(&mut connection, Mode::MultiNode, claim::PENDING_TYPES, &["''", "500"]).await;
        for table in ["outbox_event", "later", "due"] {
            assert_searches(&types, table, "outbox_event_pending_of_type");
        }
    }
}

#[tokio::test]
async fn rows_are_looked_up_by_their_numbers() {
    let changes = "'[[5, 1, 0, null, null], [6, 2, 1, 1000, \"error\"]]'";
    for mut connection in tables().await {
        for mode in MODES {
            for (sql, values) in [
                (claim::read(), &["'[5,6]'"][..]),
                (claim::LEASE.to_owned(), &["'[5,6]'", "'claim_id'", "0"]),
                (settle::still_claimed(mode), &["'[5,6]'", "'a:1,b'"]),
                (settle::lock_claimed(mode), &["'[5,6]'", "'a:1,b'"]),
                (settle::wait_for_claimed(mode), &["'[5,6]'", "'a:1,b'"]),
                (settle::mark_done(mode), &["'[5,6]'", "'a:1,b'"]),
                (settle::update(mode), &[changes, "'a:1,b'"]),
                (lease::RENEW.to_owned(), &["'[5,6]'"]),
                (lease::RELEASE.to_owned(), &["'[5,6]'"]),
                (claim::lock_ready(), &["'[5,6]'", "1000", "100", "''", "TRUE"]),
                (claim::UNLOCKED_UNFINISHED.to_owned(), &["'[5,6]'"]),
                (claim::LOCK_BLOCKED.to_owned(), &["'[5,6]'"]),
                (claim::BLOCK.to_owned(), &["'[5,6]'"]),
                (claim::UNBLOCK.to_owned(), &["'[5,6]'"]),
            ] {
                let found = plan(&mut connection, mode, &sql, values).await;
                assert_searches(&found, "outbox_event", "PRIMARY");
            }
        }
    }
}

#[tokio::test]
async fn predecessors_and_blocked_rows_are_found_by_the_index_of_keys() {
    for mut connection in tables().await {
        for mode in [Mode::Ordered(DeadHead::Block), Mode::Ordered(DeadHead::Skip)] {
            let predecessors = plan(&mut connection, mode, claim::PREDECESSORS, &["'[5,6]'"]).await;
            assert_searches(&predecessors, "outbox_event", "PRIMARY");
            assert_searches(&predecessors, "earlier", "outbox_event_key");
            let blocked = plan(&mut connection, mode, claim::BLOCKED, &["'[5,6]'", "99"]).await;
            assert_searches(&blocked, "outbox_event", "PRIMARY");
            assert_searches(&blocked, "next", "outbox_event_key");
            assert_searches(&blocked, "until", "outbox_event_key");
            let orphans =
                plan(&mut connection, mode, claim::BLOCKED_ROWS, &["'2020-01-01'", "'2020-01-01'", "0", "1000"]).await;
            assert_searches(&orphans, "blocked", "outbox_event_ready");
            assert_searches(&orphans, "earlier", "outbox_event_key");
        }
    }
}

#[tokio::test]
async fn operator_queries_do_not_read_the_backlog() {
    let one = DeadFilter { event_id: Some("1".to_owned()), ..DeadFilter::default() };
    for mut connection in tables().await {
        let mode = Mode::SingleNode;
        let dead = plan(&mut connection, mode, &operator::dead(&DeadFilter::all()), &["10"]).await;
        assert_searches(&dead, "outbox_event", "outbox_event_dead");
        let dead = plan(&mut connection, mode, &operator::replayable(&DeadFilter::all()), &["0", "10"]).await;
        assert_searches(&dead, "outbox_event", "outbox_event_dead");
        let found = plan(&mut connection, mode, &operator::dead(&one), &["'1'", "10"]).await;
        assert!(found.is_empty() || found.iter().any(|line| line.contains("event_id")), "{found:#?}");
        for purge in [Purge::Done, Purge::Everything] {
            let old = plan(&mut connection, mode, &operator::purgeable(purge), &["1", "1", "1", "500"]).await;
            assert_eq!(old.len(), 1);
            assert!(old[0].starts_with("outbox_event | index | PRIMARY | ") && !old[0].contains("filesort"), "{old:?}");
        }
        let old = plan(&mut connection, mode, &operator::purgeable(Purge::Dead), &["1", "1", "1", "500"]).await;
        assert_searches(&old, "outbox_event", "outbox_event_dead");
    }
}

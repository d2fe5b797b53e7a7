//! How SQLite executes the statements that run all the time. A plan that scans or sorts is a bug that only shows at
//! size.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use posthaste_core::outbox::{DeadHead, Mode, Purge, TableName};
use sqlx::{AssertSqlSafe, Row};

use super::{claim, fill, lease, operator, settle, undecodable};
use crate::sqlite::Database;

const MODES: [Mode; 4] =
    [Mode::SingleNode, Mode::MultiNode, Mode::Ordered(DeadHead::Block), Mode::Ordered(DeadHead::Skip)];

/// A database with a million pending rows and a tenth of that done, of ten types and a thousand aggregates, with
/// current statistics.
async fn filled(folder: &tempfile::TempDir) -> Database {
    let database = Database::open(&format!("sqlite://{}/test.db", folder.path().display())).await.unwrap();
    database.outbox(TableName::default(), Mode::ORDERED).await.unwrap();
    let fill = database.write("fill", |connection| {
        Box::pin(async move {
            let insert = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1100000)
                 INSERT INTO outbox_event (event_type, payload, status, aggregate_id, blocked)
                 SELECT 'type' || n % 10, '{}', n / 10 % 11 = 0, n % 1000, n % 7 = 0 FROM n";
            sqlx::query(insert).execute(&mut *connection).await?;
            sqlx::query("ANALYZE").execute(connection).await.map(|_| ())
        })
    });
    fill.await.unwrap();
    database
}

/// The plan of a statement. It fails the test if the statement sorts, or reads the whole table.
async fn plan(database: &Database, sql: &str, mode: Mode) -> String {
    let explain = format!("EXPLAIN QUERY PLAN {}", fill(sql, &TableName::default(), mode));
    let rows = sqlx::query(AssertSqlSafe(explain)).fetch_all(database.readers()).await.unwrap();
    let plan: String = rows.iter().map(|row| row.get::<String, _>("detail") + "\n").collect();
    assert!(!plan.contains("ORDER BY"), "sorts: {sql}\n{plan}");
    let scans = ["SCAN outbox_event", "SCAN item", "SCAN earlier"];
    assert!(!plan.lines().any(|line| scans.contains(&line)), "reads the whole table: {sql}\n{plan}");
    plan
}

/// The index that a claim in this mode reads.
fn index(mode: Mode, of_one_type: bool) -> &'static str {
    match (mode, of_one_type) {
        (Mode::Ordered(_), _) => "outbox_event_ready",
        (_, true) => "outbox_event_pending_of_type",
        (_, false) => "outbox_event_pending",
    }
}

#[tokio::test]
async fn a_claim_reads_its_index_in_order_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    for (mode, of_one_type) in MODES.iter().flat_map(|mode| [(*mode, false), (*mode, true)]) {
        let of_type = if index(mode, of_one_type).ends_with("of_type") { "event_type=? AND " } else { "" };
        let range = format!("{} ({of_type}due>? AND due<?)", index(mode, of_one_type));
        let sql = match mode.leases_rows() {
            true => claim::candidates(mode, of_one_type),
            false => claim::pending(of_one_type),
        };
        let claims = plan(&database, &sql, mode).await;
        assert!(claims.contains(&format!("SEARCH item USING INDEX {range}")), "{claims}");
        if let Mode::Ordered(_) = mode {
            let earlier = "outbox_event_key (aggregate_type=? AND aggregate_id=? AND rowid<?)";
            assert!(claims.contains(earlier) || claims.contains(&earlier.replace("rowid", "seq")), "{claims}");
        }
        let next = plan(&database, &claim::next_due(mode, of_one_type), mode).await;
        let next = next.replace("COVERING ", "");
        assert!(next.contains(&format!("outbox_event USING INDEX {}", index(mode, of_one_type))), "{next}");
    }
    let types = plan(&database, claim::PENDING_TYPES, Mode::SingleNode).await;
    assert_eq!(types.matches("outbox_event_pending_of_type").count(), 3, "{types}");
    database.close().await;
}

#[tokio::test]
async fn changed_rows_are_looked_up_by_their_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    for mode in MODES {
        let (fence, leases) = (settle::still_claimed(mode), [claim::lease(false), claim::lease(true)]);
        let others = [settle::MARK_DONE, settle::UPDATE, lease::RENEW, lease::RELEASE, claim::BLOCK, operator::DELETE];
        for sql in others.into_iter().chain(leases.iter().map(String::as_str)).chain([fence.as_str()]) {
            let plan = plan(&database, sql, mode).await;
            assert!(plan.contains("USING INTEGER PRIMARY KEY (rowid=?)"), "{sql}\n{plan}");
        }
    }
    database.close().await;
}

#[tokio::test]
async fn predecessors_and_blocked_rows_are_found_by_the_index_of_keys() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    for mode in MODES.into_iter().filter(|mode| matches!(mode, Mode::Ordered(_))) {
        let unblock = plan(&database, settle::UNBLOCK, mode).await;
        assert!(unblock.contains("outbox_event_key (aggregate_type=? AND aggregate_id=?)"), "{unblock}");
        let orphans = plan(&database, claim::BLOCKED_ROWS, mode).await;
        assert!(orphans.contains("item USING INDEX outbox_event_blocked (seq>?)"), "{orphans}");
        assert!(orphans.contains("outbox_event_key") && !orphans.contains("TEMP B-TREE"), "{orphans}");
    }
    database.close().await;
}

#[tokio::test]
async fn rows_with_an_undecodable_type_are_found_by_its_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    let plan = plan(&database, undecodable::MARK_DEAD, Mode::SingleNode).await;
    assert!(plan.contains("SEARCH outbox_event USING INTEGER PRIMARY KEY"), "{plan}");
    assert!(plan.contains("outbox_event_pending_of_type (event_type=?)"), "{plan}");
    database.close().await;
}

/// The number of steps of SQLite's virtual machine, in thousands, that a purge takes in a table without old rows.
#[tokio::test]
async fn a_purge_ends_at_the_first_young_row() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    for purge in [Purge::Done, Purge::Everything] {
        let thousands = Arc::new(AtomicU32::new(0));
        let (mut connection, counted) = (database.readers().acquire().await.unwrap(), thousands.clone());
        connection.lock_handle().await.unwrap().set_progress_handler(1_000, move || {
            counted.fetch_add(1, Ordering::Relaxed);
            true
        });
        let sql = fill(&operator::old(purge), &TableName::default(), Mode::SingleNode);
        let old = sqlx::query(AssertSqlSafe(sql)).bind(3_600_000).bind(500).fetch_all(&mut *connection).await.unwrap();
        connection.lock_handle().await.unwrap().remove_progress_handler();
        assert!(old.is_empty());
        let thousands = thousands.load(Ordering::Relaxed);
        assert!(thousands < 100, "{purge:?} takes {thousands} thousand steps for 500 rows of 1.1 million");
        let deletable = plan(&database, operator::deletable(purge), Mode::SingleNode).await;
        assert!(deletable.contains("USING INTEGER PRIMARY KEY (rowid=?)"), "{deletable}");
    }
    database.close().await;
}

#[tokio::test]
async fn operator_queries_use_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let database = filled(&folder).await;
    let mode = Mode::SingleNode;
    for sql in [operator::dead(), operator::count(), operator::replay(), operator::old(Purge::Dead)] {
        let plan = plan(&database, &sql, mode).await;
        assert!(plan.contains("outbox_event_dead"), "{sql}\n{plan}");
    }
    let find = plan(&database, &operator::find(), mode).await;
    assert!(find.contains("(event_id=?)"), "{find}");
    let oldest = plan(&database, operator::OLDEST_DUE, mode).await;
    assert!(oldest.contains("outbox_event_pending (due<?)"), "{oldest}");
    let unblocked = plan(&database, operator::OLDEST_UNBLOCKED, Mode::ORDERED).await;
    assert!(unblocked.contains("outbox_event_ready (due<?)"), "{unblocked}");
    let pending = plan(&database, operator::COUNT_PENDING, mode).await;
    assert!(pending.contains("outbox_event_pending") && !pending.contains("TEMP B-TREE"), "{pending}");
    database.close().await;
}

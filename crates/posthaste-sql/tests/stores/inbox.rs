//! A receiver that has its effect once.

use posthaste_sql::TableName;
use posthaste_sql::sqlite::Inbox;
use sqlx::SqlitePool;

use crate::support::File;

/// Counts an event in the transaction that records it.
async fn receive(pool: &SqlitePool, inbox: &Inbox, listener: &str, event_id: &str, commits: bool) -> bool {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let first = inbox.first_time(&mut transaction, listener, event_id).await.unwrap();
    if first {
        sqlx::query("UPDATE counted SET events = events + 1").execute(&mut *transaction).await.unwrap();
    }
    match commits {
        true => transaction.commit().await.unwrap(),
        false => transaction.rollback().await.unwrap(),
    }
    first
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_has_its_effect_once_for_each_listener() {
    let file = File::new();
    file.execute("CREATE TABLE counted (events INTEGER NOT NULL); INSERT INTO counted VALUES (0)").await;
    let inbox = Inbox::open(file.pool().await, TableName::new("inbox_event").unwrap()).await.unwrap();
    let pool = &file.pool().await;
    assert!(receive(pool, &inbox, "billing", "1", false).await);
    assert!(receive(pool, &inbox, "billing", "1", true).await, "what was rolled back was not had");
    assert!(!receive(pool, &inbox, "billing", "1", true).await);
    assert!(receive(pool, &inbox, "mail", "1", true).await);
    assert_eq!(file.ask::<i64>("SELECT events FROM counted").await, 2);

    let together = (0..3).map(|_| receive(pool, &inbox, "billing", "2", true));
    let firsts = futures_util::future::join_all(together).await.into_iter().filter(|first| *first).count();
    assert_eq!((firsts, file.ask::<i64>("SELECT events FROM counted").await), (1, 3));
}

#[tokio::test]
async fn what_is_old_is_forgotten_in_batches() {
    let file = File::new();
    let inbox = Inbox::open(file.pool().await, TableName::new("inbox_event").unwrap()).await.unwrap();
    let old =
        "INSERT INTO inbox_event SELECT 'l', value, (unixepoch() - 8 * 86400) * 1000 FROM json_each('[1,2,3,4,5]')";
    file.execute(old).await;
    file.execute("INSERT INTO inbox_event (listener, event_id) VALUES ('l', 'young')").await;
    let week = std::time::Duration::from_secs(7 * 24 * 60 * 60);
    assert_eq!(inbox.purge(week, 3).await.unwrap(), 3);
    assert_eq!(inbox.purge(week, 3).await.unwrap(), 2);
    assert_eq!(file.ask::<String>("SELECT group_concat(event_id, ' ') FROM inbox_event").await, "young");
}

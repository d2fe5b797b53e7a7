//! A receiver that has its effect once.

use posthaste_sql::TableName;
use posthaste_sql::postgres::Inbox;
use sqlx::PgPool;

use crate::support::Postgres;

/// Counts an event in the transaction that records it.
async fn receive(pool: &PgPool, inbox: &Inbox, listener: &str, event_id: &str, commits: bool) -> bool {
    let mut transaction = pool.begin().await.unwrap();
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
    let postgres = Postgres::start().await;
    postgres.execute("CREATE TABLE counted (events bigint NOT NULL); INSERT INTO counted VALUES (0)").await;
    let inbox = Inbox::open(postgres.pool.clone(), TableName::new("inbox_event").unwrap()).await.unwrap();
    let pool = &postgres.pool;
    assert!(receive(pool, &inbox, "billing", "1", false).await);
    assert!(receive(pool, &inbox, "billing", "1", true).await, "what was rolled back was not had");
    assert!(!receive(pool, &inbox, "billing", "1", true).await);
    assert!(receive(pool, &inbox, "mail", "1", true).await);
    assert_eq!(postgres.ask::<i64>("SELECT events FROM counted").await, 2);

    let together = (0..3).map(|_| receive(pool, &inbox, "billing", "2", true));
    let firsts = futures_util::future::join_all(together).await.into_iter().filter(|first| *first).count();
    assert_eq!((firsts, postgres.ask::<i64>("SELECT events FROM counted").await), (1, 3));
}

#[tokio::test]
async fn what_is_old_is_forgotten_in_batches() {
    let postgres = Postgres::start().await;
    let inbox = Inbox::open(postgres.pool.clone(), TableName::new("inbox_event").unwrap()).await.unwrap();
    let old = "INSERT INTO inbox_event SELECT 'l', n, now() - interval '8 days' FROM generate_series(1, 5) AS n";
    postgres.execute(old).await;
    postgres.execute("INSERT INTO inbox_event VALUES ('l', 'young')").await;
    let week = std::time::Duration::from_secs(7 * 24 * 60 * 60);
    assert_eq!(inbox.purge(week, 3).await.unwrap(), 3);
    assert_eq!(inbox.purge(week, 3).await.unwrap(), 2);
    assert_eq!(postgres.ask::<String>("SELECT string_agg(event_id, ' ') FROM inbox_event").await, "young");
}

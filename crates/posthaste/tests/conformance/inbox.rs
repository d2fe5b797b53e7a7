//! A receiver that has its effect once.

use std::time::Duration;

use async_trait::async_trait;
use posthaste::{InTransaction, TableName};

use crate::harness::{DAY, Database, Harness, MySql, Postgres, Sqlite, on_every_database};

on_every_database! {
    an_event_has_its_effect_once_for_each_listener,
    what_is_old_is_forgotten_in_batches,
    a_word_that_sql_reserves_names_an_inbox,
}

/// A database with an inbox.
#[async_trait]
trait Receiver: Database {
    type Inbox: Send + Sync;

    async fn inbox(&self) -> Self::Inbox {
        self.inbox_named("inbox_event").await
    }

    async fn inbox_named(&self, table: &str) -> Self::Inbox;

    async fn first_time(inbox: &Self::Inbox, transaction: &mut Self::Plain, listener: &str, event_id: &str) -> bool;

    async fn purge(inbox: &Self::Inbox, older_than: Duration, limit: u32) -> u64;

    /// What the inbox keeps of a time this long before now, as SQL.
    fn received(ago: Duration) -> String {
        Self::ago(ago)
    }
}

macro_rules! receiver {
    ($harness:ident, $inbox:ty $(, $received:item)?) => {
        #[async_trait]
        impl Receiver for $harness {
            type Inbox = $inbox;

            async fn inbox_named(&self, table: &str) -> $inbox {
                <$inbox>::open(self.pool().await, TableName::new(table).unwrap()).await.unwrap()
            }

            async fn first_time(inbox: &$inbox, transaction: &mut Self::Plain, listener: &str, event_id: &str) -> bool {
                inbox.first_time(transaction, listener, event_id).await.unwrap()
            }

            async fn purge(inbox: &$inbox, older_than: Duration, limit: u32) -> u64 {
                inbox.purge(older_than, limit).await.unwrap()
            }

            $($received)?
        }
    };
}

receiver!(Postgres, posthaste::postgres::Inbox);
receiver!(MySql, posthaste::mysql::Inbox);
receiver!(
    Sqlite,
    posthaste::sqlite::Inbox,
    fn received(ago: Duration) -> String {
        format!("(unixepoch() - {}) * 1000", ago.as_secs())
    }
);

/// Counts an event in the transaction that records it.
async fn receive<H: Receiver>(pool: &H::Pool, inbox: &H::Inbox, listener: &str, event_id: &str, commits: bool) -> bool {
    let mut transaction = H::begin_plain(pool).await;
    let is_first = H::first_time(inbox, &mut transaction, listener, event_id).await;
    if is_first {
        H::execute_on(transaction.connection(), "UPDATE counted SET events = events + 1").await;
    }
    match commits {
        true => H::commit_plain(transaction).await,
        false => drop(transaction),
    }
    is_first
}

async fn an_event_has_its_effect_once_for_each_listener<H: Receiver>(db: H) {
    db.execute("CREATE TABLE counted (events integer NOT NULL); INSERT INTO counted VALUES (0)").await;
    let (inbox, pool) = (db.inbox().await, db.pool().await);
    let receive = async |listener, event_id, commits| receive::<H>(&pool, &inbox, listener, event_id, commits).await;
    let counted = async || db.text("SELECT concat(events, '') FROM counted").await.unwrap();
    assert!(receive("billing", "1", false).await);
    assert!(receive("billing", "1", true).await, "what was rolled back was not had");
    assert!(!receive("billing", "1", true).await);
    assert!(receive("mail", "1", true).await);
    assert_eq!(counted().await, "2");

    let (one, two, three) =
        tokio::join!(receive("billing", "2", true), receive("billing", "2", true), receive("billing", "2", true));
    assert_eq!([one, two, three].into_iter().filter(|is_first| *is_first).count(), 1);
    assert_eq!(counted().await, "3");
}

async fn what_is_old_is_forgotten_in_batches<H: Receiver>(db: H) {
    let inbox = db.inbox().await;
    let (week_ago, numbers) = (H::received(8 * DAY), H::numbers(5));
    db.execute(&format!("INSERT INTO inbox_event SELECT 'l', concat(n, ''), {week_ago} FROM {numbers}")).await;
    db.execute("INSERT INTO inbox_event (listener, event_id) VALUES ('l', 'young')").await;
    assert_eq!(H::purge(&inbox, 7 * DAY, 3).await, 3);
    assert_eq!(H::purge(&inbox, 7 * DAY, 3).await, 2);
    assert_eq!(db.texts("SELECT event_id FROM inbox_event").await, ["young"]);
}

async fn a_word_that_sql_reserves_names_an_inbox<H: Receiver>(db: H) {
    let inbox = db.inbox_named("table").await;
    for is_first in [true, false] {
        let mut transaction = H::begin_plain(&db.pool().await).await;
        assert_eq!(H::first_time(&inbox, &mut transaction, "l", "1").await, is_first);
        H::commit_plain(transaction).await;
    }
    assert_eq!(H::purge(&inbox, DAY, 10).await, 0);
}

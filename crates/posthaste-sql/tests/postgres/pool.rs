//! Tests of the pool that the outbox shares with the service.

use std::time::Duration;

use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, Pool};
use posthaste_core::{Disposition, Settled, Settlement, Source};
use posthaste_sql::TableName;
use sqlx::Row;
use sqlx::postgres::PgPoolOptions;

use crate::support::{Postgres, event};

/// Yields to the other tasks this many times.
async fn yields(count: usize) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn cancelling_begin_leaks_no_open_transaction_into_the_pool() {
    let postgres = Postgres::start().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&postgres.url).await.unwrap();
    let store = pool.open(TableName::default(), Mode::MultiNode).await.unwrap();
    for count in 0..300 {
        tokio::select! {
            biased;
            begun = store.begin() => drop(begun),
            () = yields(count) => {}
        }
        // A statement outside of a transaction is a transaction of its own.
        let is_alone = "SELECT transaction_timestamp() = statement_timestamp()";
        let row = sqlx::raw_sql(is_alone).fetch_one(&pool).await.unwrap();
        assert!(
            row.get::<bool, _>(0),
            "`begin()` was cancelled after {count} yields and left a transaction open in the pool"
        );
    }
}

#[tokio::test]
async fn a_settlement_skips_a_row_that_an_operator_has_locked_and_succeeds_later() {
    for mode in [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED] {
        let postgres = Postgres::start().await;
        let outbox = postgres.dispatcher(mode).await;
        let source = outbox.dispatcher_source();
        postgres.write(&outbox, &[&event("1", "t", "{}")]).await;
        let claimed = source.claim(1).await.unwrap().items.remove(0);
        let mut operator = postgres.pool.begin().await.unwrap();
        sqlx::raw_sql("UPDATE outbox_event SET last_error = 'looked at'").execute(&mut *operator).await.unwrap();
        let settlement = || [Settlement { claimed: &claimed, disposition: &Disposition::Done, took: Duration::ZERO }];
        assert_eq!(source.settle(&settlement()).await.unwrap(), [Settled::Locked], "it does not wait for the operator");
        operator.commit().await.unwrap();
        assert_eq!(source.settle(&settlement()).await.unwrap(), [Settled::Applied]);
    }
}

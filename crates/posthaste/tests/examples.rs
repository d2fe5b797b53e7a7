//! The examples run and give the results that they promise.

use posthaste_backend_tests::servers;

#[allow(dead_code)]
#[path = "../examples/order_service_postgres.rs"]
mod order_service_postgres;
#[allow(dead_code)]
#[path = "../examples/order_service_sqlite.rs"]
mod order_service_sqlite;
#[allow(dead_code)]
#[path = "../examples/testing_without_a_database.rs"]
mod testing_without_a_database;

#[tokio::test(flavor = "multi_thread")]
async fn the_order_service_on_sqlite_sends_a_mail_for_each_committed_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut mails = order_service_sqlite::run(&folder.path().join("orders.db")).await.unwrap();
    mails.sort();
    // SQLite gives the number of an order that was rolled back to the next order.
    let mut expected = vec!["to ada@example.com: order 1 is placed (order.placed)".to_owned()];
    expected.push("to cleo@example.com: order 2 is placed (order.placed)".to_owned());
    assert_eq!(mails, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_service_on_two_nodes_informs_the_warehouse_in_order() {
    let of_orders = order_service_postgres::run(&servers::postgres().await).await.unwrap();
    assert_eq!(of_orders.len(), 20);
    for (order, steps) in of_orders {
        assert_eq!(steps, ["placed", "paid", "shipped"], "steps of order {order}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_is_tested_without_a_database() {
    testing_without_a_database::run().await.unwrap();
}

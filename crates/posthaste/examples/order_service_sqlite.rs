//! An order service in one file, on SQLite: `cargo run -p posthaste --example order_service_sqlite`.
//!
//! An order and its event are stored in one transaction. A listener in the same process sends the mail right after the
//! commit. If the process crashed in between, the mail would be sent at the next start.

use std::error::Error;
use std::sync::Arc;

use posthaste::{Event, Outbox, RetryPolicy};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tokio::sync::mpsc;

#[derive(Serialize, Deserialize)]
struct OrderPlaced {
    id: i64,
    customer: String,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::temp_dir().join("posthaste-order-service.db");
    for mail in run(&file).await? {
        println!("sent: {mail}");
    }
    Ok(())
}

/// Places two of three orders, and returns the mails that were sent.
pub async fn run(file: &std::path::Path) -> Result<Vec<String>, Box<dyn Error>> {
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(file).create_if_missing(true)).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, customer TEXT NOT NULL)")
        .execute(&pool)
        .await?;

    // Stands in for a mail server.
    let (mailer, mut mails) = mpsc::unbounded_channel();
    let outbox = Outbox::new(pool.clone())
        .retry(RetryPolicy::default())
        .listen_aggregate("order", "order.placed", move |order: OrderPlaced, event: Arc<Event>| {
            let sent =
                mailer.send(format!("to {}: order {} is placed ({})", order.customer, order.id, event.event_type()));
            async move { sent }
        })
        .start()
        .await?;

    for (customer, in_stock) in [("ada@example.com", true), ("ben@example.com", false), ("cleo@example.com", true)] {
        let mut transaction = outbox.begin().await?;
        let stored = sqlx::query("INSERT INTO orders (customer) VALUES (?)").bind(customer);
        let id = stored.execute(&mut *transaction).await?.last_insert_rowid();
        let order = OrderPlaced { id, customer: customer.to_owned() };
        outbox.write(&mut transaction, Event::json("order.placed", &order)?.aggregate("order", id)).await?;
        match in_stock {
            true => transaction.commit().await?,
            // The rollback undoes both the order and its event.
            false => transaction.rollback().await?,
        }
    }

    let sent = vec![mails.recv().await.ok_or("a mail")?, mails.recv().await.ok_or("another mail")?];
    outbox.close().await;
    Ok(sent)
}

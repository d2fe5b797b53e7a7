//! The order service on PostgreSQL with two nodes:
//! `cargo run -p posthaste --example order_service_postgres -- postgres://user@localhost/database`.
//!
//! Both nodes write and both deliver. The events of one order are delivered in their order, whichever node delivers
//! them and however often a delivery fails; every event is delivered once as long as no node crashes.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use posthaste::postgres::OutboxStore;
use posthaste::{Event, Failure, Outbox};
use sqlx::PgPool;
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("give the URL of a database: postgres://user@localhost/database")?;
    for (order, steps) in run(&url).await? {
        println!("order {order}: {}", steps.join(", "));
    }
    Ok(())
}

/// One process of the service. In this example two of them share one process, each with its own connections.
async fn node(
    name: &'static str,
    url: &str,
    warehouse: mpsc::UnboundedSender<(String, String)>,
) -> Result<Outbox<OutboxStore>, Box<dyn Error>> {
    let mut builder = Outbox::new(PgPool::connect(url).await?).ordered();
    for step in ["placed", "paid", "shipped"] {
        let warehouse = warehouse.clone();
        builder = builder.on_aggregate("order", step, move |event: Arc<Event>| {
            let warehouse = warehouse.clone();
            async move {
                // Now and then the warehouse does not answer. The event is tried again; the later events of its order
                // wait.
                if fastrand::f64() < 0.2 {
                    return Err(Failure::transient("warehouse", "no answer"));
                }
                let order = event.aggregate_id().unwrap_or_default().to_owned();
                let sent = warehouse.send((order, event.event_type().to_owned()));
                sent.map_err(|_| Failure::permanent("warehouse", format!("{name} has no warehouse any more")))
            }
        });
    }
    Ok(builder.start().await?)
}

/// Writes the events of twenty orders, three steps each, and returns the steps that the warehouse received for each
/// order.
pub async fn run(url: &str) -> Result<HashMap<String, Vec<String>>, Box<dyn Error>> {
    let (warehouse, mut received) = mpsc::unbounded_channel();
    let nodes = [node("one", url, warehouse.clone()).await?, node("two", url, warehouse).await?];
    for step in ["placed", "paid", "shipped"] {
        for order in 0..20 {
            let outbox = &nodes[order % 2];
            let mut transaction = outbox.begin().await?;
            // The service's own statements go here, in the same transaction.
            outbox.write(&mut transaction, Event::text(step, "{}").aggregate("order", order)).await?;
            transaction.commit().await?;
        }
    }
    let mut of_orders: HashMap<String, Vec<String>> = HashMap::new();
    for _ in 0..60 {
        let (order, step) = received.recv().await.ok_or("the warehouse receives every step")?;
        of_orders.entry(order).or_default().push(step);
    }
    for outbox in nodes {
        outbox.close().await;
    }
    Ok(of_orders)
}

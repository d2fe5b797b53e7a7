use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use futures_util::future::try_join_all;
use posthaste_api::{EventKey, SubscriptionIn};
use posthaste_core::Outcome;
use posthaste_webhook::{Auth, ClientOptions, EgressGuard, EgressPolicy, Endpoint, Request};

use super::subscriber::Subscriber;
use super::{Figure, rate};
use crate::client::Client;
use crate::config::Config;
use crate::embedded::EmbeddedServer;

const BATCH: usize = 100;
/// How many batches are sent at the same time, and how many requests of the raw probe.
const PUBLISHERS: usize = 4;
const IN_FLIGHT: usize = 64;

/// The whole pipeline on SQLite, synced to disk, with its subscriber on the same cores.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let count = if quick { 10_000 } else { 100_000 };
    let singles = if quick { 50 } else { 300 };
    let subscriber = Subscriber::start().await?;
    let raw = raw_posts(&subscriber, count).await?;

    let folder = tempfile::tempdir()?;
    let mut config = Config::default();
    config.http.listen = ([127, 0, 0, 1], 0).into();
    config.database.url = format!("sqlite://{}", folder.path().join("bench.db").display());
    let server = EmbeddedServer::start(&config, posthaste_hub::Roles::default()).await?;
    let client = Client::new(&server.url())?;
    subscribe(&client, &subscriber).await?;

    let before = subscriber.count();
    let started = Instant::now();
    publish(&client, count).await?;
    let published = rate(count, started.elapsed());
    subscriber.wait_for(before + count).await;
    let delivered = rate(count, started.elapsed());

    let latencies = latencies(&client, &subscriber, singles).await?;
    let all = subscriber.count();
    server.stop().await?;
    anyhow::ensure!(all == before + count + singles, "{} deliveries too many", all - before - count - singles);

    let of = |share: f64| latencies[((latencies.len() - 1) as f64 * share) as usize].as_secs_f64() * 1_000.0;
    Ok(vec![
        Figure::new("embedded", "publish in batches of 100, response after commit", published, "events/s"),
        Figure::new("embedded", "publish to delivered, batches of 100", delivered, "events/s")
            .at_least(10_000.0)
            .raw("the same POSTs by the same client, without the server", raw),
        Figure::new("embedded", "publish to arrival, one at a time, median", of(0.5), "ms").at_most(20.0),
        Figure::new("embedded", "publish to arrival, one at a time, 99 of 100", of(0.99), "ms"),
    ])
}

fn payload() -> String {
    format!(r#"{{"order":1,"text":"{}"}}"#, "x".repeat(230))
}

fn event() -> String {
    format!(r#"{{"eventType":"bench.placed","sourceService":"bench","payload":{}}}"#, payload())
}

async fn subscribe(client: &Client, subscriber: &Subscriber) -> anyhow::Result<()> {
    let key = EventKey { event_type: "bench.placed".to_owned(), ..EventKey::default() };
    let definition = posthaste_api::DefinitionIn { event_type: Some(key.event_type.clone()), ..Default::default() };
    client.create_definition(&definition).await?;
    let subscription = SubscriptionIn {
        subscriber_id: "bench".to_owned(),
        event_key: Some(key),
        endpoint: subscriber.endpoint(),
        ..SubscriptionIn::default()
    };
    client.create_subscription(&subscription).await?;
    Ok(())
}

async fn publish(client: &Client, count: usize) -> anyhow::Result<()> {
    let batch = Bytes::from(format!("[{}]", vec![event(); BATCH].join(",")));
    let next = Arc::new(AtomicUsize::new(0));
    try_join_all((0..PUBLISHERS).map(|_| {
        let (client, batch, next) = (client.clone(), batch.clone(), next.clone());
        tokio::spawn(async move {
            while next.fetch_add(BATCH, Ordering::Relaxed) < count {
                client.publish_batch(batch.clone()).await?;
            }
            anyhow::Ok(())
        })
    }))
    .await?
    .into_iter()
    .collect()
}

/// The time from the call to the arrival, one event at a time.
async fn latencies(client: &Client, subscriber: &Subscriber, count: usize) -> anyhow::Result<Vec<Duration>> {
    let event = serde_json::from_str(&event()).context("our own event")?;
    let mut latencies = Vec::with_capacity(count);
    for _ in 0..count {
        let before = subscriber.count();
        let started = Instant::now();
        client.publish(&event).await?;
        subscriber.wait_for(before + 1).await;
        latencies.push(started.elapsed());
    }
    latencies.sort();
    Ok(latencies)
}

/// The rate of plain HTTP requests on this machine.
async fn raw_posts(subscriber: &Subscriber, count: usize) -> anyhow::Result<f64> {
    let egress = EgressGuard::new(EgressPolicy::allowing_loopback());
    let client = posthaste_webhook::Client::new(ClientOptions { egress, ..ClientOptions::default() });
    let endpoint = Endpoint::parse(&subscriber.endpoint())?;
    let body = Bytes::from(payload());
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let workers = (0..IN_FLIGHT).map(|_| {
        let (client, endpoint, body, next) = (client.clone(), endpoint.clone(), body.clone(), next.clone());
        tokio::spawn(async move {
            while next.fetch_add(1, Ordering::Relaxed) < count {
                let request = Request {
                    endpoint: endpoint.clone(),
                    body: body.clone(),
                    content_type: Cow::Borrowed("application/json"),
                    headers: Vec::new(),
                    auth: Auth::None,
                    timeout: Duration::from_secs(5),
                };
                let outcome = client.post(request).await;
                anyhow::ensure!(outcome == Outcome::Delivered, "a POST failed: {outcome:?}");
            }
            anyhow::Ok(())
        })
    });
    try_join_all(workers).await?.into_iter().collect::<anyhow::Result<()>>()?;
    Ok(rate(count, started.elapsed()))
}

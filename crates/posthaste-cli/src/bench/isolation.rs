use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use futures_util::future::try_join_all;
use posthaste_api::{DefinitionIn, EventKey, SubscriptionIn};
use posthaste_core::lock;
use tokio::net::TcpListener;

use super::Figure;
use super::server::Server;
use crate::client::Client;
use crate::output;

const EVENT_TYPE: &str = "bench.placed";
/// How many events of the bad endpoints are published at once.
const BATCH: usize = 100;
/// How many subscriptions are made at the same time.
const AT_ONCE: usize = 8;

/// What a bad endpoint does with a request.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// It never responds.
    Hangs,
    /// It responds shortly before the timeout.
    IsSlow,
    /// Nothing listens.
    Refuses,
    /// It closes the connection instead of responding.
    Resets,
}

impl Fault {
    /// True if there is never a response.
    fn is_silent(self) -> bool {
        self != Self::IsSlow
    }

    fn word(self) -> &'static str {
        match self {
            Self::Hangs => "hang",
            Self::IsSlow => "are slow",
            Self::Refuses => "refuse",
            Self::Resets => "reset",
        }
    }
}

/// The size of the payloads, and how much is published.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    payload_bytes: usize,
    /// Events per second to the healthy endpoints.
    healthy_rate: u32,
    /// Events to the bad endpoints, published at the beginning as fast as possible.
    burst: usize,
    window: Duration,
    /// How long it takes until each endpoint that does not respond gets another request; not so long in a quick run.
    cycle: Duration,
}

/// Healthy endpoints beside bad ones, compared with a run of the same traffic in which none is bad.
pub async fn run(quick: bool, only: Option<&str>) -> anyhow::Result<Vec<Figure>> {
    let endpoints = if quick { 100 } else { 1_000 };
    let [window, cycle] = (if quick { [4, 4] } else { [15, 125] }).map(Duration::from_secs);
    let small = Load {
        name: "small events",
        payload_bytes: 250,
        healthy_rate: 200,
        burst: if quick { 2_000 } else { 20_000 },
        window,
        cycle,
    };
    let large = Load { name: "1 MiB events", payload_bytes: 1 << 20, healthy_rate: 5, burst: 100, window, cycle };
    let mut figures = Vec::new();
    for load in [small, large] {
        for bad in [1, 12, endpoints / 2] {
            let row = |fault: Fault| format!("{bad} of {endpoints} {}", fault.word());
            let is_selected =
                |fault: &Fault| only.is_none_or(|text| format!("{}, {}", load.name, row(*fault)).contains(text));
            let faults = [Fault::Hangs, Fault::IsSlow, Fault::Refuses, Fault::Resets].into_iter().filter(is_selected);
            let faults: Vec<Fault> = faults.collect();
            if faults.is_empty() {
                continue;
            }
            let mut none_bad = None;
            for fault in std::iter::once(None).chain(faults.into_iter().map(Some)) {
                let what = match fault {
                    None => format!("burst to {bad} of {endpoints}, none is bad"),
                    Some(fault) => row(fault),
                };
                output::say(format_args!("  {}: {what} …", load.name));
                let run = Run::measure(endpoints, bad, fault, load).await?;
                figures.extend(run.figures(load, &what, fault, none_bad.as_ref()));
                none_bad.get_or_insert(run);
            }
        }
    }
    anyhow::ensure!(!figures.is_empty(), "no row has a name that contains {:?}", only.unwrap_or_default());
    Ok(figures)
}

struct Run {
    /// From the publish to the arrival at a healthy endpoint, sorted.
    latencies: Vec<Duration>,
    /// After the traffic, while dead letters wait: CPU of one core in percent, and megabytes written per second.
    waiting_cpu: f64,
    waiting_written: f64,
    peak_megabytes: f64,
}

impl Run {
    async fn measure(endpoints: usize, bad: usize, fault: Option<Fault>, load: Load) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (server, _) = Server::start(folder.path())?;
        let client = Client::new(server.url())?;
        let arrivals = Arc::new(Arrivals::default());
        let healthy = serve(arrivals.clone()).await?;
        let faulty = match fault {
            Some(fault) => faulty_endpoint(fault).await?,
            None => healthy,
        };
        subscribe(&client, endpoints, |number| if number < bad { faulty } else { healthy }).await?;

        // Every healthy endpoint has responded once, as in a server that has been running for a while.
        let mut published = Vec::new();
        for tenant in bad..endpoints {
            published.push(publish(&client, tenant, format!("first-{tenant}"), 250, &arrivals).await?);
        }
        arrivals.wait_for(published.len()).await?;
        arrivals.clear();

        let burst = tokio::spawn(publish_burst(client.clone(), bad, load));
        let mut tick = tokio::time::interval(Duration::from_secs(1) / load.healthy_rate);
        let (began, mut sent) = (Instant::now(), Vec::new());
        while began.elapsed() < load.window {
            tick.tick().await;
            let number = sent.len();
            let tenant = bad + number % (endpoints - bad);
            let (client, arrivals) = (client.clone(), arrivals.clone());
            sent.push(tokio::spawn(async move {
                publish(&client, tenant, number.to_string(), load.payload_bytes, &arrivals).await
            }));
        }
        let count = sent.len();
        for publish in sent {
            publish.await??;
        }
        burst.await??;
        let latencies = arrivals.wait_for(count).await?;

        // Until then the pauses between the requests to endpoints that do not respond have become long.
        tokio::time::sleep(load.window).await;
        // If there are many of them, long enough for about one request to each.
        let waiting = if fault.is_some_and(Fault::is_silent) && bad > 12 { load.cycle } else { load.window / 2 };
        let (ticks, written) = (server.cpu_ticks()?, server.written_megabytes()?);
        tokio::time::sleep(waiting).await;
        let waiting_cpu = (server.cpu_ticks()? - ticks) as f64 / waiting.as_secs_f64();
        let waiting_written = (server.written_megabytes()? - written) / waiting.as_secs_f64();
        let peak_megabytes = server.peak_megabytes()?;
        anyhow::ensure!(arrivals.count() == count, "{} deliveries too many", arrivals.count() - count);
        Ok(Self { latencies, waiting_cpu, waiting_written, peak_megabytes })
    }

    fn millis(&self, share: f64) -> f64 {
        self.latencies[((self.latencies.len() - 1) as f64 * share) as usize].as_secs_f64() * 1_000.0
    }

    fn figures(&self, load: Load, what: &str, fault: Option<Fault>, none_bad: Option<&Self>) -> Vec<Figure> {
        let figure =
            |name: &str, value, unit| Figure::new("isolation", format!("{}, {what}: {name}", load.name), value, unit);
        let mut slowest = figure("healthy p99", self.millis(0.99), "ms");
        if let Some(none_bad) = none_bad {
            let without = none_bad.millis(0.99);
            slowest = slowest.at_most((2.0 * without).max(without + 50.0));
        }
        let mut waiting_cpu = figure("CPU while dead letters wait", self.waiting_cpu, "%");
        // The dead letters of slow endpoints do not wait: they are delivered meanwhile.
        if fault.is_none_or(Fault::is_silent) {
            waiting_cpu = waiting_cpu.at_most(1.0);
        }
        vec![
            figure("healthy p50", self.millis(0.5), "ms"),
            slowest,
            figure("peak memory", self.peak_megabytes, "MB"),
            waiting_cpu,
            figure("written while dead letters wait", self.waiting_written, "MB/s"),
        ]
    }
}

/// When each event of the healthy endpoints was published and arrived.
#[derive(Default)]
struct Arrivals(Mutex<HashMap<String, Arrival>>);

struct Arrival {
    published: Instant,
    latency: Option<Duration>,
    count: usize,
}

impl Arrivals {
    fn published(&self, id: &str) {
        lock(&self.0).insert(id.to_owned(), Arrival { published: Instant::now(), latency: None, count: 0 });
    }

    fn arrived(&self, id: &str) {
        if let Some(arrival) = lock(&self.0).get_mut(id) {
            arrival.latency.get_or_insert_with(|| arrival.published.elapsed());
            arrival.count += 1;
        }
    }

    fn count(&self) -> usize {
        lock(&self.0).values().map(|arrival| arrival.count).sum()
    }

    fn clear(&self) {
        lock(&self.0).clear();
    }

    /// Waits until this many events have arrived, and returns their latencies, sorted.
    async fn wait_for(&self, count: usize) -> anyhow::Result<Vec<Duration>> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let mut latencies: Vec<Duration> = lock(&self.0).values().filter_map(|arrival| arrival.latency).collect();
            if latencies.len() >= count {
                latencies.sort();
                return Ok(latencies);
            }
            anyhow::ensure!(Instant::now() < deadline, "{} of {count} events arrived", latencies.len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn serve(arrivals: Arc<Arrivals>) -> anyhow::Result<SocketAddr> {
    async fn receive(
        State(arrivals): State<Arc<Arrivals>>,
        _: Path<String>,
        headers: HeaderMap,
        _: Bytes,
    ) -> StatusCode {
        if let Some(id) = headers.get("webhook-id").and_then(|id| id.to_str().ok()) {
            arrivals.arrived(id);
        }
        StatusCode::NO_CONTENT
    }
    let limit = axum::extract::DefaultBodyLimit::max(4 << 20);
    serve_app(Router::new().route("/{number}", post(receive)).layer(limit).with_state(arrivals)).await
}

async fn serve_app(app: Router) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

async fn faulty_endpoint(fault: Fault) -> anyhow::Result<SocketAddr> {
    match fault {
        Fault::Hangs => serve_app(Router::new().fallback(std::future::pending::<StatusCode>)).await,
        Fault::IsSlow => {
            let slow = async || {
                tokio::time::sleep(Duration::from_millis(800)).await;
                StatusCode::NO_CONTENT
            };
            serve_app(Router::new().fallback(slow)).await
        }
        Fault::Refuses => Ok(TcpListener::bind("127.0.0.1:0").await?.local_addr()?),
        Fault::Resets => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let address = listener.local_addr()?;
            tokio::spawn(async move {
                while let Ok((connection, _)) = listener.accept().await {
                    // Closing a connection with unread data resets it.
                    drop(connection);
                }
            });
            Ok(address)
        }
    }
}

/// One subscription per endpoint, each for a tenant of its own.
async fn subscribe(client: &Client, endpoints: usize, address: impl Fn(usize) -> SocketAddr) -> anyhow::Result<()> {
    let key = EventKey { event_type: EVENT_TYPE.to_owned(), ..EventKey::default() };
    client.create_definition(&DefinitionIn { event_type: Some(EVENT_TYPE.to_owned()), ..Default::default() }).await?;
    let numbers: Vec<usize> = (0..endpoints).collect();
    for numbers in numbers.chunks(AT_ONCE) {
        let subscriptions: Vec<SubscriptionIn> = numbers
            .iter()
            .map(|number| SubscriptionIn {
                subscriber_id: format!("subscriber-{number}"),
                event_key: Some(key.clone()),
                endpoint: format!("http://{}/{number}", address(*number)),
                tenant_id: Some(tenant(*number)),
                ..SubscriptionIn::default()
            })
            .collect();
        try_join_all(subscriptions.iter().map(|subscription| client.create_subscription(subscription))).await?;
    }
    Ok(())
}

fn tenant(number: usize) -> String {
    format!("tenant-{number}")
}

fn event(tenant_number: usize, id: Option<&str>, payload_bytes: usize) -> serde_json::Value {
    let mut event = serde_json::json!({
        "eventType": EVENT_TYPE,
        "sourceService": "bench",
        "tenantId": tenant(tenant_number),
        "payload": { "text": "x".repeat(payload_bytes - 11) },
    });
    if let Some(id) = id {
        event["eventId"] = id.into();
    }
    event
}

async fn publish(
    client: &Client,
    tenant_number: usize,
    id: String,
    payload_bytes: usize,
    arrivals: &Arrivals,
) -> anyhow::Result<()> {
    let event = serde_json::from_value(event(tenant_number, Some(&id), payload_bytes))?;
    arrivals.published(&id);
    client.publish(&event).await?;
    Ok(())
}

/// Publishes the events of the bad endpoints.
async fn publish_burst(client: Client, bad: usize, load: Load) -> anyhow::Result<()> {
    // A batch is not larger than the server accepts.
    let batch = BATCH.min(((4 << 20) / load.payload_bytes).max(1));
    for first in (0..load.burst).step_by(batch) {
        let events: Vec<_> =
            (first..first + batch).map(|number| event(number % bad, None, load.payload_bytes)).collect();
        client.publish_batch(Bytes::from(serde_json::to_vec(&events)?)).await?;
    }
    Ok(())
}

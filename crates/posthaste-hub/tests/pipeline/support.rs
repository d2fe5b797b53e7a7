use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use posthaste_api::{AuthIn, EventIn, EventKey, SubscriptionIn};
use posthaste_core::hub_store;
use posthaste_hub::{Accepted, Created, Hub, Parts, RegistrationError, Sealer, Settings};
use posthaste_schema::SchemaRegistry;
use posthaste_sql::sqlite::HubDatabase;
use posthaste_webhook::{Client, ClientOptions, EgressGuard, EgressPolicy};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Sqlite};
use tempfile::TempDir;
use tokio::sync::Notify;
use uuid::Uuid;

/// An HTTP server that remembers its requests and responds with the status that the test sets.
#[derive(Clone, Default)]
pub struct Subscriber(Arc<Inbox>);

struct Inbox {
    received: Mutex<Vec<(HeaderMap, Bytes)>>,
    arrived: Notify,
    answer: Mutex<StatusCode>,
    /// The answer to this many first requests.
    first: Mutex<(usize, StatusCode)>,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            received: Mutex::default(),
            arrived: Notify::new(),
            answer: Mutex::new(StatusCode::OK),
            first: Mutex::default(),
        }
    }
}

impl Subscriber {
    pub async fn start(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().route("/hook", post(receive)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    }

    pub fn answer(&self, status: StatusCode) {
        *self.0.answer.lock().unwrap() = status;
    }

    /// Answers this many first requests in this way, and the others as `answer` says.
    pub fn answer_first(&self, count: usize, status: StatusCode) {
        *self.0.first.lock().unwrap() = (count, status);
    }

    pub fn received(&self) -> Vec<(HeaderMap, Bytes)> {
        self.0.received.lock().unwrap().clone()
    }

    /// Waits until this many requests have arrived.
    pub async fn wait_for(&self, count: usize) -> Vec<(HeaderMap, Bytes)> {
        let waiting = async {
            loop {
                let arrived = self.0.arrived.notified();
                if self.received().len() >= count {
                    return;
                }
                arrived.await;
            }
        };
        let enough = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        assert!(enough.is_ok(), "{} of {count} requests arrived", self.received().len());
        self.received()
    }
}

async fn receive(State(subscriber): State<Subscriber>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let number = {
        let mut received = subscriber.0.received.lock().unwrap();
        received.push((headers, body));
        received.len()
    };
    subscriber.0.arrived.notify_waiters();
    let (count, status) = *subscriber.0.first.lock().unwrap();
    if number <= count { status } else { *subscriber.0.answer.lock().unwrap() }
}

pub struct World {
    pub hub: Arc<Hub>,
    folder: TempDir,
}

pub async fn start(settings: Settings) -> World {
    let folder = tempfile::tempdir().unwrap();
    let hub = open(folder.path(), settings).await;
    World { hub, folder }
}

pub async fn open(folder: &Path, settings: Settings) -> Arc<Hub> {
    open_on(folder, open_database(folder).await, settings).await
}

pub async fn open_database(folder: &Path) -> Arc<HubDatabase> {
    let url = format!("sqlite://{}", folder.join("hub.db").display());
    Arc::new(HubDatabase::open(&url).await.unwrap())
}

pub async fn open_on(folder: &Path, database: Arc<dyn hub_store::HubDatabase>, settings: Settings) -> Arc<Hub> {
    open_with_registry(folder, database, None, settings).await
}

pub async fn open_with_registry(
    folder: &Path,
    database: Arc<dyn hub_store::HubDatabase>,
    registry: Option<Arc<dyn SchemaRegistry>>,
    settings: Settings,
) -> Arc<Hub> {
    // The subscribers of tests are on this machine.
    let egress = EgressGuard::new(EgressPolicy::allowing_loopback());
    open_parts(folder, database, registry, egress, settings).await
}

/// Opens a hub that sends only to what this guard allows.
pub async fn open_with_egress(folder: &Path, egress: EgressGuard, settings: Settings) -> Arc<Hub> {
    open_parts(folder, open_database(folder).await, None, egress, settings).await
}

async fn open_parts(
    folder: &Path,
    database: Arc<dyn hub_store::HubDatabase>,
    registry: Option<Arc<dyn SchemaRegistry>>,
    egress: EgressGuard,
    settings: Settings,
) -> Arc<Hub> {
    // Installed before a hub counts or logs anything.
    metrics();
    log();
    let sealer = Sealer::open(&folder.join("hub.key")).unwrap();
    let client = Client::new(ClientOptions { egress, ..ClientOptions::default() });
    let (channel_buses, sources, roles) = Default::default();
    Hub::start(Parts { database, bus: None, registry, channel_buses, sources, client, sealer, settings, roles })
        .await
        .unwrap()
}

/// The default settings, with which a request does not time out because the machine is busy.
pub fn test_settings() -> Settings {
    let mut settings = Settings::default();
    settings.delivery.timeout = Duration::from_secs(60);
    settings.dlt.timeout = Duration::from_secs(60);
    settings
}

/// Settings with which dead letters become due fast, so that a test sees all their retries.
pub fn with_fast_retries() -> Settings {
    let mut settings = test_settings();
    settings.dlt.retry_interval = Duration::from_millis(200);
    settings
}

pub async fn subscribe(hub: &Hub, event_type: &str, subscriber: &str, endpoint: &str, auth: Option<AuthIn>) {
    try_subscribe(hub, event_type, subscriber, endpoint, auth).await.unwrap();
}

/// Creates a subscription, and its definition if there is none, and returns the subscription's id.
pub async fn try_subscribe(
    hub: &Hub,
    event_type: &str,
    subscriber: &str,
    endpoint: &str,
    auth: Option<AuthIn>,
) -> Result<Uuid, RegistrationError> {
    let key = EventKey { event_type: event_type.to_owned(), ..EventKey::default() };
    let known = hub.registrations().create_definition(key.clone(), None).await;
    drop(known);
    let subscription = SubscriptionIn {
        subscriber_id: subscriber.to_owned(),
        event_key: Some(key),
        endpoint: endpoint.to_owned(),
        auth,
        ..SubscriptionIn::default()
    };
    let created = hub.registrations().create_subscription(subscription.validate().unwrap()).await?;
    Ok(match created {
        Created::New(made) | Created::Existing(made) => made.value.id,
    })
}

pub async fn publish(hub: &Hub, json: &str) -> String {
    let event = serde_json::from_str::<EventIn>(json).unwrap().validate().unwrap();
    let id = event.id().to_owned();
    let accepted = hub.ingest().publish(vec![event], false).await.unwrap();
    assert!(matches!(accepted[..], [Accepted::Stored]), "{accepted:?}");
    id
}

pub fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    headers.get(name).unwrap_or_else(|| panic!("no header {name}")).to_str().unwrap()
}

/// Calls `look` until it returns a value.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < end, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs plain SQL on the database of a folder, as any other program would.
pub async fn execute(folder: &Path, sql: impl Into<String>) {
    let mut connection = connect(folder).await;
    sqlx::raw_sql(AssertSqlSafe(sql.into())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

/// One value of one row of the database of a folder.
pub async fn ask<T>(folder: &Path, sql: &'static str) -> T
where
    T: for<'r> sqlx::Decode<'r, Sqlite> + sqlx::Type<Sqlite> + Send + Unpin,
{
    let mut connection = connect(folder).await;
    let answer = sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    answer
}

async fn connect(folder: &Path) -> SqliteConnection {
    let file = SqliteConnectOptions::new().filename(folder.join("hub.db")).busy_timeout(Duration::from_secs(20));
    file.connect().await.unwrap()
}

impl World {
    pub async fn execute(&self, sql: impl Into<String>) {
        execute(self.folder.path(), sql).await;
    }

    pub async fn ask<T>(&self, sql: &'static str) -> T
    where
        T: for<'r> sqlx::Decode<'r, Sqlite> + sqlx::Type<Sqlite> + Send + Unpin,
    {
        ask(self.folder.path(), sql).await
    }
}

/// The metrics of all hubs of this process.
fn metrics() -> &'static PrometheusHandle {
    static METRICS: OnceLock<PrometheusHandle> = OnceLock::new();
    METRICS.get_or_init(|| PrometheusBuilder::new().install_recorder().unwrap())
}

/// Asserts that this counter, with its labels, is above zero.
pub fn assert_counted(counter: &str) {
    let text = metrics().render();
    let counted = text.lines().find_map(|line| line.strip_prefix(counter)?.trim().parse::<f64>().ok());
    assert!(counted.is_some_and(|counted| counted > 0.0), "{counter} is not counted in:\n{text}");
}

/// The log of all hubs of this process.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn log() -> &'static Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = Log::default();
        let writer = log.clone();
        let filter = tracing_subscriber::EnvFilter::new("warn");
        tracing_subscriber::fmt().with_ansi(false).with_env_filter(filter).with_writer(move || writer.clone()).init();
        log
    })
}

/// The lines that hubs of this process have logged, warnings and errors.
pub fn log_lines() -> Vec<String> {
    String::from_utf8_lossy(&log().0.lock().unwrap()).lines().map(str::to_owned).collect()
}

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::BuildError;
use posthaste_core::FaultKind;
#[cfg(feature = "kafka")]
use posthaste_core::StoreError;
use posthaste_core::hub_store::{OpenError, Registry};
use posthaste_core::outbox;
use posthaste_hub::{Hub, Parts, Roles, Sealer, SecretError};
use posthaste_schema::RegistryError;
use posthaste_webhook::{Client, ClientOptions, EgressGuard};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bus;
use crate::config::Config;
use crate::database;
use crate::exit::Exit;
use crate::registry;
use crate::sources;
use crate::telemetry;

/// How often the metrics recorder drains its histograms, so that they do not grow between two scrapes.
const METRICS_MAINTENANCE: Duration = Duration::from_secs(5);

/// A whole server in this process: database, pipeline and HTTP.
pub struct EmbeddedServer {
    address: SocketAddr,
    hub: Arc<Hub>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    metrics_maintenance: JoinHandle<()>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}: another program uses this address; stop it, or set http.listen or --listen")]
    AddressInUse {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error(transparent)]
    Secrets(#[from] SecretError),
    #[error(transparent)]
    Hub(#[from] posthaste_hub::StartError),
    #[cfg(feature = "kafka")]
    #[error("the bus cannot be used with this configuration: {0}")]
    BusSetting(String),
    #[cfg(feature = "kafka")]
    #[error("the bus cannot be used: {}", .0.chain())]
    Bus(StoreError),
    #[error("{}", .0.join("\n"))]
    Sources(Vec<String>),
    #[error("the schema registry cannot be used with this configuration: {0}")]
    RegistrySetting(String),
    #[error(transparent)]
    Registry(RegistryError),
    #[error("the metrics recorder cannot start")]
    Metrics(#[from] BuildError),
}

impl StartError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::AddressInUse { .. } | Self::Listen { .. } | Self::Metrics(_) => Exit::Failed,
            Self::Secrets(SecretError::KeyFile { .. }) => Exit::Unreachable,
            Self::Secrets(_) | Self::RegistrySetting(_) | Self::Sources(_) => Exit::Usage,
            Self::Registry(_) => Exit::Unreachable,
            #[cfg(feature = "kafka")]
            Self::BusSetting(_) => Exit::Usage,
            #[cfg(feature = "kafka")]
            Self::Bus(error) => match error.kind() {
                FaultKind::Permanent => Exit::Failed,
                _ => Exit::Unreachable,
            },
            Self::Database(error) | Self::Hub(posthaste_hub::StartError::Open(error)) => match error {
                // The database answers, and says no: for example, this user may not read a table.
                OpenError::Store(error) | OpenError::Outbox(outbox::OpenError::Store(error))
                    if error.kind() == FaultKind::Permanent =>
                {
                    Exit::Failed
                }
                OpenError::Outbox(outbox::OpenError::Store(_)) => Exit::Unreachable,
                // The database can be reached, but this program cannot use it.
                OpenError::InUse { .. }
                | OpenError::NewerSchema { .. }
                | OpenError::Migration(_)
                | OpenError::Outbox(_) => Exit::Failed,
                _ => Exit::Unreachable,
            },
            Self::Hub(_) => Exit::Unreachable,
        }
    }
}

impl EmbeddedServer {
    /// Returns when the server accepts requests. Opens the address and the database, which other programs may use,
    /// before it delivers any event.
    pub async fn start(config: &Config, roles: Roles) -> Result<Self, StartError> {
        let metrics = telemetry::metrics()?;
        let listener = listen(config.http.listen).await?;
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: config.http.listen, source })?;
        let bus = bus::open(config)?;
        let registry = registry::open(&config.registry)?;
        let channel_buses = bus::of_channels(config)?;
        let sources = sources::parts(config)?;
        let database = database::open(&config.database).await?;
        database.migrate().await?;
        let sealer = open_sealer(config, &*database.registry()).await?;
        let egress = EgressGuard::new(config.egress_policy());
        let client = Client::new(ClientOptions { egress, ..ClientOptions::default() });
        let settings = config.settings();
        let parts = Parts { database, bus, registry, channel_buses, sources, client, sealer, settings, roles };
        let hub = Hub::start(parts).await?;
        let stop = CancellationToken::new();
        let limits = config.client_limits();
        let serving = posthaste_server::serve(listener, hub.clone(), metrics.clone(), limits, stop.clone());
        let serving = tokio::spawn(serving);
        let metrics_maintenance = tokio::spawn(async move {
            loop {
                tokio::time::sleep(METRICS_MAINTENANCE).await;
                metrics.run_upkeep();
            }
        });
        Ok(Self { address, hub, stop, serving, metrics_maintenance })
    }

    /// The address of the server, with its real port if the configured one is 0.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns only if the server ends without `stop`, which should never happen.
    pub async fn ended(&mut self) -> io::Result<()> {
        (&mut self.serving).await.map_err(io::Error::other)
    }

    /// Responds to the requests received so far, finishes the deliveries in flight, and closes the database.
    pub async fn stop(self) -> io::Result<()> {
        self.stop.cancel();
        // After `ended` the task is finished and must not be awaited again.
        let served = match self.serving.is_finished() {
            true => Ok(()),
            false => self.serving.await.map_err(io::Error::other),
        };
        self.hub.stop().await;
        self.metrics_maintenance.abort();
        served
    }
}

/// The key of the installation. Creates a new key only if no credentials are sealed with an old one, and no other server
/// may need the same key.
async fn open_sealer(config: &Config, registry: &dyn Registry) -> Result<Sealer, StartError> {
    let path = config.key_file();
    match Sealer::read(&path) {
        Err(SecretError::Missing(_)) => {
            let sealed = registry.has_sealed_credentials().await;
            match sealed.map_err(posthaste_hub::StartError::Store)? {
                true => Err(SecretError::Missing(path).into()),
                false if database::is_shared(&config.database.url) => Err(SecretError::Unshared(path).into()),
                false => Ok(Sealer::open(&path)?),
            }
        }
        read => Ok(read?),
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::AddressInUse { address, source },
        _ => StartError::Listen { address, source },
    })
}

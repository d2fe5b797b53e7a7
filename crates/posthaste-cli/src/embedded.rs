use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::BuildError;
use posthaste_core::hub_store::{OpenError, Registry};
use posthaste_core::outbox;
use posthaste_hub::{Hub, Parts, Sealer, SecretError};
use posthaste_webhook::{Client, ClientOptions};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::database;
use crate::exit::Exit;
use crate::telemetry;

/// How often histograms are drained so that they do not grow between two scrapes.
const UPKEEP: Duration = Duration::from_secs(5);

/// A whole server in this process: database, pipeline and HTTP.
pub struct EmbeddedServer {
    address: SocketAddr,
    hub: Arc<Hub>,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    upkeep: JoinHandle<()>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}: another program uses it; stop that one, or set http.listen or --listen")]
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
    #[error("metrics cannot be counted")]
    Metrics(#[from] BuildError),
}

impl StartError {
    pub fn exit(&self) -> Exit {
        match self {
            Self::AddressInUse { .. } | Self::Listen { .. } | Self::Metrics(_) => Exit::Failed,
            Self::Secrets(SecretError::KeyFile { .. }) => Exit::Unreachable,
            Self::Secrets(_) => Exit::Usage,
            Self::Database(error) | Self::Hub(posthaste_hub::StartError::Open(error)) => match error {
                OpenError::Outbox(outbox::OpenError::Store(_)) => Exit::Unreachable,
                // The database was reached, and this program cannot use it.
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
    /// Returns when requests are answered. The address and the database, which others may use, are opened before anything
    /// is delivered.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let metrics = telemetry::metrics()?;
        let listener = listen(config.http.listen).await?;
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: config.http.listen, source })?;
        let database = database::open(&config.database.url).await?;
        database.migrate().await?;
        let sealer = open_sealer(&config.key_file(), &*database.registry()).await?;
        let client = Client::new(ClientOptions::default());
        let parts = Parts { database, client, sealer, settings: config.settings() };
        let hub = Arc::new(Hub::start(parts).await?);
        let stop = CancellationToken::new();
        let limits = config.client_limits();
        let serving = posthaste_server::serve(listener, hub.clone(), metrics.clone(), limits, stop.clone());
        let serving = tokio::spawn(serving);
        let upkeep = tokio::spawn(async move {
            loop {
                tokio::time::sleep(UPKEEP).await;
                metrics.run_upkeep();
            }
        });
        Ok(Self { address, hub, stop, serving, upkeep })
    }

    /// Where it is, with the port that it really has.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns only if the server ends by itself, which it never should.
    pub async fn ended(&mut self) -> io::Result<()> {
        (&mut self.serving).await.map_err(io::Error::other)
    }

    /// Answers what was asked already, then finishes what is under way and closes the database.
    pub async fn stop(self) -> io::Result<()> {
        self.stop.cancel();
        // After `ended` there is nothing left to wait for.
        let served = match self.serving.is_finished() {
            true => Ok(()),
            false => self.serving.await.map_err(io::Error::other),
        };
        self.hub.stop().await;
        self.upkeep.abort();
        served
    }
}

/// The key of the installation. A new one is made only as long as nothing is sealed with an old one.
async fn open_sealer(path: &Path, registry: &dyn Registry) -> Result<Sealer, StartError> {
    match Sealer::read(path) {
        Err(SecretError::Missing(_)) => {
            let sealed = registry.has_sealed_credentials().await;
            match sealed.map_err(posthaste_hub::StartError::Store)? {
                true => Err(SecretError::Missing(path.to_owned()).into()),
                false => Ok(Sealer::open(path)?),
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

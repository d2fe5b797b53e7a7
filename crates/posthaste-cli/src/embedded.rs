use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::BuildError;
use posthaste_core::outbox;
use posthaste_hub::{Hub, Parts, Sealer, SecretError};
use posthaste_sql::sqlite::{Database, OpenError, Registry};
use posthaste_webhook::{Client, ClientOptions};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
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
    /// Released last, when nothing uses the database any more.
    _lock: DatabaseLock,
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
    #[error(
        "database {} cannot be used: check that its folder exists and that this user may write there", path.display()
    )]
    Unwritable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("database {} is in use by another posthaste server: stop that one, or set database.url", path.display())]
    DatabaseInUse { path: PathBuf },
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
            Self::AddressInUse { .. } | Self::Listen { .. } | Self::DatabaseInUse { .. } | Self::Metrics(_) => {
                Exit::Failed
            }
            Self::Unwritable { .. } | Self::Secrets(SecretError::KeyFile { .. }) => Exit::Unreachable,
            Self::Secrets(_) => Exit::Usage,
            Self::Database(error) | Self::Hub(posthaste_hub::StartError::Open(error)) => match error {
                // The database was reached; it is this program that cannot use it.
                OpenError::NewerSchema { .. } | OpenError::Migration(_) => Exit::Failed,
                _ => Exit::Unreachable,
            },
            Self::Hub(posthaste_hub::StartError::Outbox(outbox::OpenError::Store(_))) => Exit::Unreachable,
            Self::Hub(posthaste_hub::StartError::Outbox(_)) => Exit::Failed,
            Self::Hub(_) => Exit::Unreachable,
        }
    }
}

impl EmbeddedServer {
    /// Returns when requests are answered. What others may hold (address, database) is taken before anything moves.
    pub async fn start(config: &Config) -> Result<Self, StartError> {
        let metrics = telemetry::metrics()?;
        let listener = listen(config.http.listen).await?;
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: config.http.listen, source })?;
        let lock = DatabaseLock::take(config)?;
        make_private(&config.database_file());
        let database = Database::open(&config.database.url).await?;
        database.migrate_hub().await?;
        let sealer = open_sealer(&config.key_file(), &database).await?;
        let parts = Parts {
            database,
            client: Client::new(ClientOptions::default()),
            sealer,
            settings: config.settings(),
            // The lock says so.
            alone: true,
        };
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
        Ok(Self { address, hub, stop, serving, upkeep, _lock: lock })
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
pub async fn open_sealer(path: &Path, database: &Database) -> Result<Sealer, StartError> {
    match Sealer::read(path) {
        Err(SecretError::Missing(_)) => {
            let sealed = Registry::new(database.clone()).has_sealed_credentials().await;
            match sealed.map_err(posthaste_hub::StartError::Store)? {
                true => Err(SecretError::Missing(path.to_owned()).into()),
                false => Ok(Sealer::open(path)?),
            }
        }
        read => Ok(read?),
    }
}

/// Makes a new database file that only its owner can read: it holds payloads. SQLite gives the files beside it (-wal,
/// -shm) the mode of the database. An older file keeps the mode that somebody gave it.
fn make_private(path: &Path) {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let mode = std::fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o777).unwrap_or(0);
            if mode & 0o007 != 0 {
                let path = path.display();
                tracing::warn!(
                    "every user can read or write database {path} (mode {mode:03o}): run `chmod 600 {path}`"
                );
            }
        }
        // SQLite will say what is wrong with the place.
        Err(_) => {}
    }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::AddressInUse { address, source },
        _ => StartError::Listen { address, source },
    })
}

/// Shows other servers that the database is taken. The system takes it back when the process ends, however it ends.
pub struct DatabaseLock {
    _file: File,
}

impl DatabaseLock {
    pub fn take(config: &Config) -> Result<Self, StartError> {
        let path = config.database_file();
        Self::take_file(&config.lock_file()).map_err(|error| match error {
            TryLockError::WouldBlock => StartError::DatabaseInUse { path },
            TryLockError::Error(source) => StartError::Unwritable { path, source },
        })
    }

    /// Whether a server holds it, without leaving anything behind.
    pub fn is_taken(config: &Config) -> io::Result<bool> {
        match OpenOptions::new().read(true).open(config.lock_file()) {
            Ok(file) => match file.try_lock_shared() {
                Ok(()) => Ok(false),
                Err(TryLockError::WouldBlock) => Ok(true),
                Err(TryLockError::Error(error)) => Err(error),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn take_file(path: &Path) -> Result<Self, TryLockError> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = file.map_err(TryLockError::Error)?;
        file.try_lock()?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_once_and_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.db.lock");
        let lock = DatabaseLock::take_file(&path).unwrap();
        assert!(matches!(DatabaseLock::take_file(&path), Err(TryLockError::WouldBlock)));
        drop(lock);
        assert!(DatabaseLock::take_file(&path).is_ok());
    }
}

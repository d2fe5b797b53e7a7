use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use tokio::sync::Semaphore;
use tower_service::Service;

use super::{DeniedAddress, EgressPolicy};
use crate::endpoint::Endpoint;

/// How long [`EgressGuard::check`] waits for the addresses of a name.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// How many names are resolved at the same time for checks. A lookup occupies a thread until the operating system gives
/// up, and the deliveries need threads too.
const MAX_CHECKS: usize = 16;

/// Finds the addresses of a host name. The default asks the operating system.
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of the name. Their ports have no meaning.
    fn resolve(&self, name: &str) -> Resolving;
}

/// A lookup of the addresses of a name.
pub type Resolving = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;

/// A policy, and the resolver whose addresses it judges. Cheap to clone.
#[derive(Clone)]
pub struct EgressGuard {
    policy: Arc<EgressPolicy>,
    resolver: Arc<dyn Resolve>,
    checks: Arc<Semaphore>,
}

/// A destination to which no request may be sent. Its text says why, and how to allow it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EgressDenied {
    /// The endpoint has an address instead of a name.
    #[error("{0}")]
    Address(DeniedAddress),
    /// The endpoint has a name, and at least one of its addresses is denied.
    #[error("the host {name:?} resolves to an address that is denied: {denied}")]
    Name {
        /// The name.
        name: String,
        /// The first address that is denied.
        denied: DeniedAddress,
    },
}

impl EgressGuard {
    /// A guard that asks the operating system for the addresses of names.
    pub fn new(policy: EgressPolicy) -> Self {
        Self::with_resolver(policy, Arc::new(SystemResolver))
    }

    /// A guard that asks another resolver.
    pub fn with_resolver(policy: EgressPolicy, resolver: Arc<dyn Resolve>) -> Self {
        Self { policy: Arc::new(policy), resolver, checks: Arc::new(Semaphore::new(MAX_CHECKS)) }
    }

    /// Checks an endpoint before it is stored. A name that has no addresses now is accepted, because it may have some
    /// later, and so is a name that is not resolved within two seconds: every connection is judged again.
    pub async fn check(&self, endpoint: &Endpoint) -> Result<(), EgressDenied> {
        if let Some(address) = endpoint.address() {
            return self.judge_literal(address);
        }
        let (resolver, checks) = (self.resolver.clone(), self.checks.clone());
        let name = endpoint.host().to_owned();
        let addresses = tokio::time::timeout(CHECK_TIMEOUT, async move {
            let permit = checks.acquire_owned().await.ok()?;
            // A task of its own, so that the permit is kept until the lookup has ended and not only until the timeout.
            let lookup = tokio::spawn(async move {
                let addresses = resolver.resolve(&name).await;
                drop(permit);
                addresses
            });
            lookup.await.ok()?.ok()
        });
        let addresses = addresses.await.ok().flatten().unwrap_or_default();
        self.judge_all(endpoint.host(), &addresses)
    }

    /// Judges an address that stands in an endpoint.
    pub(super) fn judge_literal(&self, address: IpAddr) -> Result<(), EgressDenied> {
        self.policy.judge(address).map_err(EgressDenied::Address)
    }

    /// The addresses of a name, if all of them are allowed.
    pub(super) async fn resolve(&self, name: &str) -> Result<Vec<SocketAddr>, ResolveError> {
        let addresses = self.resolver.resolve(name).await.map_err(ResolveError::Failed)?;
        self.judge_all(name, &addresses)?;
        Ok(addresses)
    }

    /// One denied address refuses the name: which of its addresses a connection would use is left to chance, or to the
    /// owner of the name.
    fn judge_all(&self, name: &str, addresses: &[SocketAddr]) -> Result<(), EgressDenied> {
        let denied = addresses.iter().find_map(|address| self.policy.judge(address.ip()).err());
        denied.map_or(Ok(()), |denied| Err(EgressDenied::Name { name: name.to_owned(), denied }))
    }
}

impl Default for EgressGuard {
    fn default() -> Self {
        Self::new(EgressPolicy::default())
    }
}

impl fmt::Debug for EgressGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EgressGuard").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// Why a name has no addresses to connect to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    /// The name does not exist, or the resolver failed.
    #[error("{0}")]
    Failed(io::Error),
    #[error("the destination is denied")]
    Denied(#[from] EgressDenied),
}

/// The resolver of the operating system, on a thread where it may block.
struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: &str) -> Resolving {
        let name = name.parse::<Name>();
        Box::pin(async move {
            let name = name.map_err(io::Error::other)?;
            Ok(GaiResolver::new().call(name).await?.collect())
        })
    }
}

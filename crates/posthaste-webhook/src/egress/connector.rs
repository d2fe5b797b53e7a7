use std::error::Error;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use std::vec;

use hyper::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::EgressGuard;
use super::guard::ResolveError;
use crate::endpoint;

/// Makes TCP connections, only to addresses that its guard has judged.
///
/// An address in the URI is judged here, because the connector inside does not ask its resolver about addresses. A name
/// is judged by [`GuardedResolver`], whose addresses the connector inside uses as they are: nothing is resolved a second
/// time between the check and the connection.
///
/// A pooled connection is not judged again. It goes to an address that was judged when it was opened, and a guard never
/// changes: a change of the configuration needs a new process.
#[derive(Clone)]
pub(crate) struct GuardedConnector {
    inner: HttpConnector<GuardedResolver>,
    guard: EgressGuard,
}

type BoxError = Box<dyn Error + Send + Sync>;
type Pending<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl GuardedConnector {
    pub(crate) fn new(guard: EgressGuard, connect_timeout: Duration) -> Self {
        let mut inner = HttpConnector::new_with_resolver(GuardedResolver(guard.clone()));
        inner.enforce_http(false);
        inner.set_nodelay(true);
        inner.set_connect_timeout(Some(connect_timeout));
        Self { inner, guard }
    }
}

impl Service<Uri> for GuardedConnector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pending<Self::Response, BoxError>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(BoxError::from)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let judged = endpoint::address_in(&uri).map_or(Ok(()), |address| self.guard.judge_literal(address));
        if let Err(denied) = judged {
            return Box::pin(async { Err(denied.into()) });
        }
        let connecting = self.inner.call(uri);
        Box::pin(async { Ok(connecting.await?) })
    }
}

/// Resolves names, and fails if an address of a name is denied.
#[derive(Clone)]
pub(crate) struct GuardedResolver(EgressGuard);

impl Service<Name> for GuardedResolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = ResolveError;
    type Future = Pending<Self::Response, ResolveError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ResolveError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let guard = self.0.clone();
        Box::pin(async move { Ok(guard.resolve(name.as_str()).await?.into_iter()) })
    }
}

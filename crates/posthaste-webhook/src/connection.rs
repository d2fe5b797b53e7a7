use std::error::Error;
use std::io;
use std::time::Duration;

use hyper_util::client::legacy;
use posthaste_core::Failure;

use crate::egress::{EgressDenied, ResolveError};
use crate::endpoint::Endpoint;
use crate::request::Request;

/// An exchange that ended without a complete response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    /// Before the head of the response arrived.
    #[error(transparent)]
    Request(#[from] legacy::Error),
    /// While the body was read.
    #[error(transparent)]
    Body(#[from] hyper::Error),
}

impl ExchangeError {
    /// Why the guard denied the connection, if it did. Nothing was sent then.
    pub(crate) fn denied(&self) -> Option<&EgressDenied> {
        self.causes().find_map(|cause| cause.downcast_ref::<EgressDenied>())
    }

    /// The failure that an operator reads, with a status that stands for its cause.
    pub(crate) fn failure(&self, endpoint: &Endpoint, connect_timeout: Duration) -> Failure {
        let peer = endpoint.authority();
        let is_connect = matches!(self, Self::Request(error) if error.is_connect());
        let (code, message) = if self.has::<ResolveError>() {
            ("502", format!("cannot resolve host {:?}", endpoint.host()))
        } else if self.has::<rustls::Error>() || self.is_broken_handshake() {
            ("525", format!("TLS with {peer} failed"))
        } else {
            match self.io_kind() {
                Some(io::ErrorKind::ConnectionRefused) => ("503", format!("connection refused by {peer}")),
                Some(io::ErrorKind::TimedOut) if is_connect => {
                    ("504", format!("no connection to {peer} within {connect_timeout:?}"))
                }
                Some(io::ErrorKind::TimedOut) => ("504", format!("connection to {peer} timed out")),
                _ if is_connect => ("502", format!("cannot connect to {peer}")),
                _ => ("502", self.broken_answer(peer)),
            }
        };
        let failure = Failure::transient(code, message);
        match self.root() {
            Some(cause) => failure.cause(cause),
            None => failure,
        }
    }

    fn broken_answer(&self, peer: &str) -> String {
        let hyper_error = self.causes().find_map(|cause| cause.downcast_ref::<hyper::Error>());
        match hyper_error {
            Some(error) if error.is_parse() && matches!(self, Self::Request(_)) => {
                format!("the answer of {peer} cannot be read as HTTP")
            }
            _ => format!("{peer} closed the connection before its answer was complete"),
        }
    }

    /// The connector reports an error below TLS as its own type, and an error of the handshake, such as a peer that
    /// closes the connection, as a plain I/O error.
    fn is_broken_handshake(&self) -> bool {
        let Self::Request(error) = self else { return false };
        error.is_connect() && error.source().is_some_and(|cause| cause.is::<io::Error>())
    }

    fn io_kind(&self) -> Option<io::ErrorKind> {
        self.causes().filter_map(|cause| cause.downcast_ref::<io::Error>()).last().map(io::Error::kind)
    }

    fn has<E: Error + 'static>(&self) -> bool {
        self.causes().any(|cause| cause.is::<E>())
    }

    /// The innermost cause.
    fn root(&self) -> Option<String> {
        self.causes().last().map(|cause| cause.to_string())
    }

    fn causes(&self) -> impl Iterator<Item = &(dyn Error + 'static)> {
        let first: &(dyn Error + 'static) = match self {
            Self::Request(error) => error,
            Self::Body(error) => error,
        };
        // `source` of an I/O error skips the wrapped error; only `get_ref` returns it.
        std::iter::successors(Some(first), |&cause| match cause.downcast_ref::<io::Error>() {
            Some(error) => error.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => cause.source(),
        })
    }
}

/// The failure of a request to a destination that the guard denies. An attempt later would be denied as well.
pub(crate) fn egress_denied(endpoint: &Endpoint, denied: &EgressDenied) -> Failure {
    let message = format!("nothing is sent to {}: this server may not call its address", endpoint.authority());
    Failure::permanent("egress_denied", message).cause(denied.to_string())
}

/// The failure of a request that timed out.
pub(crate) fn timed_out(request: &Request, head_arrived: bool) -> Failure {
    let (peer, timeout) = (request.endpoint.authority(), request.timeout);
    Failure::transient(
        "504",
        match head_arrived {
            true => format!("the answer of {peer} was not complete within {timeout:?}"),
            false => format!("no answer from {peer} within {timeout:?}"),
        },
    )
}

//! The egress guard: subscribers choose the endpoints, so without it they could make the server call the network behind
//! it, such as a database or the metadata service of a cloud at 169.254.169.254.
//!
//! [`EgressPolicy`] is the rule about one address. [`EgressGuard`] applies it to an endpoint, and the connector of a
//! client applies it to every connection.

mod cidr;
mod connector;
mod guard;
mod special_ranges;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, SocketAddr};

pub use cidr::{Cidr, CidrError};
pub(crate) use connector::GuardedConnector;
pub(crate) use guard::ResolveError;
pub use guard::{EgressDenied, EgressGuard, Resolve, Resolving};

use special_ranges::{SpecialRange, embedded, special_range};

/// Which addresses requests may be sent to: all public ones, and what an operator allows. The default allows only public
/// ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressPolicy {
    allow: Vec<Cidr>,
}

/// The addresses of the same machine.
const LOOPBACK: [Cidr; 2] = [Cidr::v4([127, 0, 0, 0], 8), Cidr::v6([0, 0, 0, 0, 0, 0, 0, 1], 128)];

impl EgressPolicy {
    /// Allows these addresses, beside public ones.
    pub fn allowing(allow: impl IntoIterator<Item = Cidr>) -> Self {
        Self { allow: allow.into_iter().collect() }
    }

    /// Allows the addresses of the same machine, beside public ones.
    pub fn allowing_loopback() -> Self {
        Self::allowing(LOOPBACK)
    }

    /// The policy of a server that listens on these addresses, and whose operator allows these ranges.
    ///
    /// Only programs of the same machine can use a server that listens on loopback. They can call each other anyway, so
    /// it allows loopback endpoints. A server that listens on any other address allows only what its operator writes.
    pub fn of_server(listen: &[SocketAddr], allow: impl IntoIterator<Item = Cidr>) -> Self {
        let is_local = !listen.is_empty() && listen.iter().all(|address| address.ip().is_loopback());
        Self::allowing(allow.into_iter().chain(LOOPBACK.into_iter().filter(|_| is_local)))
    }

    /// Decides about one address. An IPv6 address that leads to an IPv4 address is judged as that one.
    pub fn judge(&self, address: IpAddr) -> Result<(), DeniedAddress> {
        let embedded = embedded(address);
        let is_allowed = |address| self.allow.iter().any(|range| range.contains(address));
        match special_range(embedded.unwrap_or(address)) {
            Some(range) if !is_allowed(address) && !embedded.is_some_and(is_allowed) => {
                Err(DeniedAddress { address, embedded, range })
            }
            _ => Ok(()),
        }
    }
}

/// An address to which no request may be sent. Its text says which address, in which range, and how to allow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeniedAddress {
    address: IpAddr,
    /// The IPv4 address to which it leads.
    embedded: Option<IpAddr>,
    range: &'static SpecialRange,
}

impl fmt::Display for DeniedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpecialRange { network, name, source } = self.range;
        write!(f, "{}", self.address)?;
        if let Some(embedded) = self.embedded {
            write!(f, ", which leads to {embedded},")?;
        }
        write!(f, " is not a public address but in {network} ({name}, {source}); to allow it, an operator adds ")?;
        write!(f, "\"{}\" or a larger range to egress.allow", Cidr::of(self.embedded.unwrap_or(self.address)))
    }
}

impl std::error::Error for DeniedAddress {}

use std::net::{IpAddr, Ipv4Addr};

use super::cidr::Cidr;

/// A range of addresses that are not public, and where that is written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SpecialRange {
    pub(crate) network: Cidr,
    pub(crate) name: &'static str,
    /// The document that the registry names for the range.
    pub(crate) source: &'static str,
}

/// The IPv4 ranges that are not public.
///
/// From the "IANA IPv4 Special-Purpose Address Registry", every range that is not globally reachable. A range inside of
/// another is left out if both mean the same to this guard: all of 192.0.0.0/24 is denied, also the two anycast
/// addresses in it that are reachable, because devices of the own network answer there. 224.0.0.0/4 is from the "IANA
/// IPv4 Multicast Address Space Registry".
pub(crate) const IPV4: &[SpecialRange] = &[
    v4([0, 0, 0, 0], 8, "this network", "RFC 791"),
    v4([10, 0, 0, 0], 8, "private use", "RFC 1918"),
    v4([100, 64, 0, 0], 10, "shared address space of carriers", "RFC 6598"),
    v4([127, 0, 0, 0], 8, "loopback", "RFC 1122"),
    v4([169, 254, 0, 0], 16, "link-local", "RFC 3927"),
    v4([172, 16, 0, 0], 12, "private use", "RFC 1918"),
    v4([192, 0, 0, 0], 24, "IETF protocol assignments", "RFC 6890"),
    v4([192, 0, 2, 0], 24, "documentation", "RFC 5737"),
    v4([192, 88, 99, 0], 24, "6to4 relays", "RFC 7526"),
    v4([192, 168, 0, 0], 16, "private use", "RFC 1918"),
    v4([198, 18, 0, 0], 15, "benchmarking", "RFC 2544"),
    v4([198, 51, 100, 0], 24, "documentation", "RFC 5737"),
    v4([203, 0, 113, 0], 24, "documentation", "RFC 5737"),
    v4([224, 0, 0, 0], 4, "multicast", "RFC 5771"),
    v4([240, 0, 0, 0], 4, "reserved", "RFC 1112"),
    v4([255, 255, 255, 255], 32, "broadcast", "RFC 919"),
];

/// The IPv6 ranges that are not public, beside all that are outside of 2000::/3.
///
/// From the "IANA IPv6 Special-Purpose Address Registry", every range that is not globally reachable, and all of
/// 2001::/23, because no server of a subscriber is in its reachable parts either (anycast addresses, identifiers and DNS
/// sinks). fec0::/10 and ff00::/8 are from the "Internet Protocol Version 6 Address Space" registry. Ranges outside of
/// 2000::/3 are here so that messages can name them.
pub(crate) const IPV6: &[SpecialRange] = &[
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, "unspecified", "RFC 4291"),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128, "loopback", "RFC 4291"),
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48, "local-use NAT64", "RFC 8215"),
    v6([0x100, 0, 0, 0, 0, 0, 0, 0], 64, "discard-only", "RFC 6666"),
    v6([0x100, 0, 0, 1, 0, 0, 0, 0], 64, "dummy prefix", "RFC 9780"),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23, "IETF protocol assignments", "RFC 2928"),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32, "Teredo", "RFC 4380"),
    v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48, "benchmarking", "RFC 5180"),
    v6([0x2001, 0x10, 0, 0, 0, 0, 0, 0], 28, "ORCHID", "RFC 4843"),
    v6([0x2001, 0x20, 0, 0, 0, 0, 0, 0], 28, "ORCHIDv2", "RFC 7343"),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32, "documentation", "RFC 3849"),
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16, "6to4", "RFC 3056"),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20, "documentation", "RFC 9637"),
    v6([0x5f00, 0, 0, 0, 0, 0, 0, 0], 16, "segment routing", "RFC 9602"),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7, "unique local", "RFC 4193"),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, "link-local", "RFC 4291"),
    v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10, "site-local", "RFC 3879"),
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8, "multicast", "RFC 4291"),
];

/// The only addresses of IPv6 that are given to networks ("IANA IPv6 Global Unicast Address Assignments").
const GLOBAL_UNICAST: Cidr = Cidr::v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
/// What is outside of [`GLOBAL_UNICAST`] and has no row above.
const NOT_GLOBAL_UNICAST: SpecialRange = v6([0; 8], 0, "outside of global unicast, 2000::/3", "RFC 4291");

/// Ranges of IPv6 whose last 32 bits are the IPv4 address that packets go to in the end: IPv4-mapped and
/// IPv4-compatible (RFC 4291), and NAT64 (RFC 6052).
const EMBEDDING: [Cidr; 3] =
    [Cidr::v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), Cidr::v6([0; 8], 96), Cidr::v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96)];

const fn v4(first: [u8; 4], prefix: u8, name: &'static str, source: &'static str) -> SpecialRange {
    SpecialRange { network: Cidr::v4(first, prefix), name, source }
}

const fn v6(first: [u16; 8], prefix: u8, name: &'static str, source: &'static str) -> SpecialRange {
    SpecialRange { network: Cidr::v6(first, prefix), name, source }
}

/// The range for which an address is not public, the smallest one; `None` for a public address.
pub(crate) fn special_range(address: IpAddr) -> Option<&'static SpecialRange> {
    let table = if address.is_ipv4() { IPV4 } else { IPV6 };
    let ranges = table.iter().filter(|range| range.network.contains(address));
    let is_public = || address.is_ipv4() || GLOBAL_UNICAST.contains(address);
    ranges.max_by_key(|range| range.network.prefix()).or_else(|| (!is_public()).then_some(&NOT_GLOBAL_UNICAST))
}

/// The IPv4 address to which an IPv6 address leads.
pub(crate) fn embedded(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(v6) = address else { return None };
    // These two are in the range of IPv4-compatible addresses, but are not such addresses.
    if v6.is_unspecified() || v6.is_loopback() || !EMBEDDING.iter().any(|range| range.contains(address)) {
        return None;
    }
    let [.., a, b, c, d] = v6.octets();
    Some(Ipv4Addr::new(a, b, c, d).into())
}

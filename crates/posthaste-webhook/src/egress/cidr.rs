use std::fmt;
use std::net::{AddrParseError, IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A range of IP addresses: an address and the number of its leading bits that all addresses of the range share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    /// The first address of the range.
    first: IpAddr,
    prefix: u8,
}

/// Why a text is not a range of addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CidrError {
    /// No address in front of the slash.
    #[error("{text:?} is not a range of addresses: write one such as \"10.0.0.0/8\", \"fd00::/8\" or \"192.168.1.7\"")]
    Address {
        /// The whole text.
        text: String,
        /// What is wrong with the address in it.
        #[source]
        source: AddrParseError,
    },
    /// No number after the slash, or one that is too large.
    #[error("{text:?} has a prefix that is not 0 to {longest}: write a range such as \"{first}/{longest}\"")]
    Prefix {
        /// The whole text.
        text: String,
        /// The address in front of the slash.
        first: IpAddr,
        /// The number of bits of the address.
        longest: u8,
    },
    /// An address inside of the range instead of its first one. It may be a typing error that opens too much.
    #[error("{text:?} does not start with the first address of its range: write \"{range}\" for the whole range")]
    HostBits {
        /// The whole text.
        text: String,
        /// The range that the address is in.
        range: Cidr,
    },
}

impl Cidr {
    pub(super) const fn v4(first: [u8; 4], prefix: u8) -> Self {
        let [a, b, c, d] = first;
        Self { first: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
    }

    pub(super) const fn v6(first: [u16; 8], prefix: u8) -> Self {
        let [a, b, c, d, e, f, g, h] = first;
        Self { first: IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), prefix }
    }

    /// The range that has only this address.
    pub fn of(address: IpAddr) -> Self {
        Self { first: address, prefix: bits_of(address) }
    }

    /// True if the address is in the range. An address of the other family never is.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.first.is_ipv4() == address.is_ipv4() && first_of(address, self.prefix) == self.first
    }

    pub(super) fn prefix(&self) -> u8 {
        self.prefix
    }
}

fn bits_of(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// The first address of the range of this size that the address is in.
fn first_of(address: IpAddr, prefix: u8) -> IpAddr {
    // A shift by all bits of a number is an overflow: the prefix is 0 then, and no bit is shared.
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            Ipv4Addr::from_bits(address.to_bits() & mask).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    /// Reads `ADDRESS/PREFIX`, or one address.
    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address = address.parse::<IpAddr>();
        let address = address.map_err(|source| CidrError::Address { text: text.to_owned(), source })?;
        let Some(prefix) = prefix else { return Ok(Self::of(address)) };
        let longest = bits_of(address);
        let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix = prefix.parse().ok().filter(|prefix| is_number && *prefix <= longest);
        let prefix = prefix.ok_or_else(|| CidrError::Prefix { text: text.to_owned(), first: address, longest })?;
        let range = Self { first: first_of(address, prefix), prefix };
        match range.first == address {
            true => Ok(range),
            false => Err(CidrError::HostBits { text: text.to_owned(), range }),
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Cidr>().unwrap_err().to_string()
    }

    #[test]
    fn a_range_contains_its_first_and_last_address_and_no_neighbour() {
        for (text, first, last, before, after) in [
            ("10.0.0.0/8", "10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
            ("100.64.0.0/10", "100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
            ("192.0.2.7/32", "192.0.2.7", "192.0.2.7", "192.0.2.6", "192.0.2.8"),
            ("fe80::/10", "fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "fe7f::", "fec0::"),
            ("::1/128", "::1", "::1", "::", "::2"),
        ] {
            let contains = |address: &str| range(text).contains(address.parse().unwrap());
            assert!(contains(first) && contains(last), "{text}");
            assert!(!contains(before) && !contains(after), "{text}");
        }
    }

    #[test]
    fn a_range_of_one_family_contains_no_address_of_the_other() {
        assert!(range("0.0.0.0/0").contains([255, 255, 255, 255].into()));
        assert!(range("::/0").contains("ffff::".parse().unwrap()));
        assert!(!range("0.0.0.0/0").contains("::1".parse().unwrap()));
        assert!(!range("::/0").contains([127, 0, 0, 1].into()));
    }

    #[test]
    fn an_address_alone_is_a_range_of_one() {
        assert_eq!(range("192.168.1.7"), range("192.168.1.7/32"));
        assert_eq!(range("::1").to_string(), "::1/128");
    }

    #[test]
    fn a_refusal_says_what_to_write() {
        for text in ["", "/", "/8", "10.0.0/8", "010.0.0.0/8", "localhost", "10.0.0.0 /8", "[::1]", "fe80::%eth0/64"] {
            assert!(refusal(text).contains("is not a range of addresses: write one such as"), "{text}");
        }
        for text in ["10.0.0.0/", "10.0.0.0/33", "10.0.0.0/+8", "10.0.0.0/-1", "10.0.0.0/8/8", "10.0.0.0/255.0.0.0"] {
            assert!(refusal(text).contains("has a prefix that is not 0 to 32"), "{text}");
        }
        assert!(refusal("fd00::/129").contains("not 0 to 128"));
        let host_bits = "\"10.1.2.3/8\" does not start with the first address of its range: write \"10.0.0.0/8\"";
        assert!(refusal("10.1.2.3/8").starts_with(host_bits));
    }

    proptest! {
        #[test]
        fn every_range_is_read_as_it_is_written(bits: u128, prefix in 0u8..=128, is_v4: bool) {
            let address = if is_v4 { Ipv4Addr::from_bits(bits as u32).into() } else { Ipv6Addr::from_bits(bits).into() };
            let prefix = prefix.min(bits_of(address));
            let written = Cidr { first: first_of(address, prefix), prefix };
            prop_assert!(written.contains(address));
            prop_assert_eq!(written.to_string().parse::<Cidr>().unwrap(), written);
        }
    }
}

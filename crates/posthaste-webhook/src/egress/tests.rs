//! The egress table: every range in every form in which an address can be written, the neighbours of every range, and
//! the whole rule against a second one that is written without the table.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::special_ranges::{IPV4, IPV6};
use super::*;
use crate::endpoint::{Endpoint, EndpointError};

fn strict(address: impl Into<IpAddr>) -> Result<(), DeniedAddress> {
    EgressPolicy::default().judge(address.into())
}

fn range(text: &str) -> Cidr {
    text.parse().unwrap()
}

/// The first and the last address of a range, and the neighbours on both sides.
fn borders(range: &Cidr) -> ([IpAddr; 2], Vec<IpAddr>) {
    let text = range.to_string();
    let first: IpAddr = text.split('/').next().unwrap().parse().unwrap();
    match first {
        IpAddr::V4(first) => {
            let first = first.to_bits();
            let last = first | u32::MAX.checked_shr(range.prefix().into()).unwrap_or(0);
            let beside = [first.checked_sub(1), last.checked_add(1)].into_iter().flatten();
            let address = |bits| IpAddr::from(Ipv4Addr::from_bits(bits));
            ([address(first), address(last)], beside.map(address).collect())
        }
        IpAddr::V6(first) => {
            let first = first.to_bits();
            let last = first | u128::MAX.checked_shr(range.prefix().into()).unwrap_or(0);
            let beside = [first.checked_sub(1), last.checked_add(1)].into_iter().flatten();
            let address = |bits| IpAddr::from(Ipv6Addr::from_bits(bits));
            ([address(first), address(last)], beside.map(address).collect())
        }
    }
}

/// The rule, written a second time: with the methods of the standard library and plain comparisons.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            let is_special = address.is_private()
                || address.is_loopback()
                || address.is_link_local()
                || address.is_documentation()
                || address.is_multicast()
                || a == 0
                || a >= 240
                || (a == 100 && (64..128).contains(&b))
                || (a == 192 && b == 0 && c == 0)
                || (a == 192 && b == 88 && c == 99)
                || (a == 198 && (b == 18 || b == 19));
            !is_special
        }
        IpAddr::V6(address) => {
            let [a, b, c, d, e, f, g, h] = address.segments();
            let v4 = Ipv4Addr::from([g.to_be_bytes(), h.to_be_bytes()].concat().first_chunk::<4>().copied().unwrap());
            match [a, b, c, d, e, f] {
                [0, 0, 0, 0, 0, 0] if g == 0 && h <= 1 => false,
                [0, 0, 0, 0, 0, 0 | 0xffff] | [0x64, 0xff9b, 0, 0, 0, 0] => is_public(v4.into()),
                _ => {
                    let is_special =
                        (a == 0x2001 && (b < 0x200 || b == 0xdb8)) || a == 0x2002 || (a == 0x3fff && b < 0x1000);
                    (0x2000..0x4000).contains(&a) && !is_special
                }
            }
        }
    }
}

#[test]
fn every_special_range_is_denied_from_its_first_to_its_last_address() {
    for special in IPV4.iter().chain(IPV6) {
        for address in borders(&special.network).0 {
            let denied = strict(address).expect_err(&address.to_string());
            assert!(denied.range.network.prefix() >= special.network.prefix(), "a smaller range says more: {denied}");
            assert!(denied.range.network.contains(address), "{denied}");
            let denied = denied.to_string();
            assert!(denied.contains("egress.allow"), "{denied}");
        }
    }
}

#[test]
fn the_neighbours_of_every_range_are_judged_by_themselves() {
    for special in IPV4.iter().chain(IPV6) {
        for address in borders(&special.network).1 {
            assert_eq!(strict(address).is_ok(), is_public(address), "{address} beside {}", special.network);
        }
    }
}

#[test]
fn every_row_has_a_name_a_source_and_the_first_address_of_its_range() {
    for special in IPV4.iter().chain(IPV6) {
        assert_eq!(range(&special.network.to_string()), special.network);
        assert!(!special.name.is_empty() && special.source.starts_with("RFC "), "{special:?}");
    }
}

#[test]
fn public_addresses_pass() {
    for address in [
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        // Sinks for DNS (RFC 7534, RFC 7535) and multicast relays (RFC 7450), which the registry calls reachable.
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "2001:200::1",
        "2001:db7:ffff::1",
        "2001:db9::1",
        "2606:4700:4700::1111",
        "2620:4f:8000::1",
        "2a00:1450:4001:81b::200e",
        "3ffe::1",
        "3fff:1000::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ] {
        assert_eq!(strict(address.parse::<IpAddr>().unwrap()), Ok(()), "{address}");
    }
}

#[test]
fn addresses_that_attackers_use_are_denied_with_the_range_that_says_why() {
    for (address, why) in [
        ("0.0.0.0", "0.0.0.0/8 (this network, RFC 791)"),
        ("127.0.0.1", "127.0.0.0/8 (loopback, RFC 1122)"),
        ("169.254.169.254", "169.254.0.0/16 (link-local, RFC 3927)"),
        ("192.0.0.9", "192.0.0.0/24 (IETF protocol assignments, RFC 6890)"),
        ("255.255.255.255", "255.255.255.255/32 (broadcast, RFC 919)"),
        ("::", "::/128 (unspecified, RFC 4291)"),
        ("::1", "::1/128 (loopback, RFC 4291)"),
        ("::ffff:127.0.0.1", "which leads to 127.0.0.1, is not a public address but in 127.0.0.0/8"),
        ("::10.0.0.1", "which leads to 10.0.0.1, is not a public address but in 10.0.0.0/8"),
        ("64:ff9b::a9fe:a9fe", "which leads to 169.254.169.254, is not"),
        ("64:ff9b:1::8.8.8.8", "64:ff9b:1::/48 (local-use NAT64, RFC 8215)"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001::/32 (Teredo, RFC 4380)"),
        ("2001:1::1", "2001::/23 (IETF protocol assignments, RFC 2928)"),
        ("2002:808:808::1", "2002::/16 (6to4, RFC 3056)"),
        ("fd00:ec2::254", "fc00::/7 (unique local, RFC 4193)"),
        ("fe80::1", "fe80::/10 (link-local, RFC 4291)"),
        ("4000::1", "::/0 (outside of global unicast, 2000::/3, RFC 4291)"),
        ("::ffff:0:8.8.8.8", "::/0 (outside of global unicast, 2000::/3, RFC 4291)"),
    ] {
        let denied = strict(address.parse::<IpAddr>().unwrap()).expect_err(address).to_string();
        assert!(denied.contains(why), "{denied}");
    }
}

#[test]
fn an_allowed_range_opens_its_addresses_and_no_others() {
    let policy = EgressPolicy::allowing([range("10.1.0.0/16"), range("fd00::/8")]);
    let judge = |address: &str| policy.judge(address.parse().unwrap());
    for address in ["10.1.0.0", "10.1.255.255", "fd12::1", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "8.8.8.8"] {
        assert_eq!(judge(address), Ok(()), "{address}");
    }
    for address in ["10.0.255.255", "10.2.0.0", "fc00::1", "::ffff:10.2.0.0", "127.0.0.1", "::1"] {
        assert!(judge(address).is_err(), "{address}");
    }
    let nat64 = EgressPolicy::allowing([range("64:ff9b::/96")]);
    assert_eq!(nat64.judge("64:ff9b::10.1.2.3".parse().unwrap()), Ok(()), "the form in the endpoint counts too");
    assert!(nat64.judge([10, 1, 2, 3].into()).is_err());
}

#[test]
fn only_a_server_that_listens_on_loopback_allows_loopback() {
    let listen = |addresses: &[&str]| addresses.iter().map(|address| address.parse().unwrap()).collect::<Vec<_>>();
    for (addresses, is_allowed) in [
        (listen(&["127.0.0.1:8080"]), true),
        (listen(&["127.9.9.9:0"]), true),
        (listen(&["[::1]:8080"]), true),
        (listen(&["127.0.0.1:8080", "[::1]:50051"]), true),
        (listen(&["0.0.0.0:8080"]), false),
        (listen(&["[::]:8080"]), false),
        (listen(&["192.168.1.7:8080"]), false),
        (listen(&["127.0.0.1:8080", "0.0.0.0:50051"]), false),
        (listen(&[]), false),
    ] {
        let policy = EgressPolicy::of_server(&addresses, []);
        for loopback in ["127.0.0.1", "127.255.255.255", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(policy.judge(loopback.parse().unwrap()).is_ok(), is_allowed, "{loopback} on {addresses:?}");
        }
        for other in ["0.0.0.0", "::", "10.0.0.1", "169.254.169.254", "fe80::1"] {
            assert!(policy.judge(other.parse().unwrap()).is_err(), "{other} on {addresses:?}");
        }
        let opened = EgressPolicy::of_server(&addresses, [range("10.0.0.0/8")]);
        assert_eq!(opened.judge([10, 0, 0, 1].into()), Ok(()), "on {addresses:?}");
    }
}

/// Every way to write an IPv4 address in a URL that some program reads as that address.
fn forms_of(address: Ipv4Addr) -> Vec<String> {
    let bits = address.to_bits();
    let [a, b, c, d] = address.octets();
    let low_24 = bits & 0xff_ffff;
    let low_16 = bits & 0xffff;
    let dotted = address.to_string();
    let full_width = |text: &str| {
        let wide = |digit: char| char::from_u32(u32::from(digit) - u32::from('0') + 0xff10).unwrap();
        text.chars().map(|character| if character == '.' { '。' } else { wide(character) }).collect::<String>()
    };
    let percent = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let [.., g, h] = address.to_ipv6_mapped().segments();
    vec![
        dotted.clone(),
        format!("{dotted}."),
        bits.to_string(),
        format!("{bits}."),
        format!("{bits:#x}"),
        format!("0X{bits:08X}"),
        format!("0{bits:o}"),
        format!("000{bits:o}"),
        format!("{a}.{low_24}"),
        format!("{a}.{b}.{low_16}"),
        format!("{a:#x}.{b:#x}.{c:#x}.{d:#x}"),
        format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
        format!("{a}.0{b:o}.{c:#x}.{d}"),
        format!("{a:#x}.{low_24:#x}"),
        full_width(&dotted),
        full_width(&bits.to_string()),
        percent(&dotted),
        percent(&bits.to_string()),
        dotted.replace('.', "%2E"),
        dotted.replace('.', "\u{ff0e}"),
        // A soft hyphen is not visible and is dropped from host names.
        dotted.replace('.', ".\u{ad}"),
        format!("[::ffff:{dotted}]"),
        format!("[::FFFF:{g:x}:{h:x}]"),
        format!("[0:0:0:0:0:ffff:{g:04x}:{h:04x}]"),
        format!("[::{dotted}]"),
        format!("[64:ff9b::{dotted}]"),
        format!("[64:ff9b::{g:x}:{h:x}]"),
    ]
}

#[test]
fn a_denied_ipv4_address_is_denied_in_every_form() {
    for special in IPV4 {
        let ([first, last], _) = borders(&special.network);
        for address in [first, last] {
            let IpAddr::V4(v4) = address else { unreachable!("the table is of IPv4") };
            for form in forms_of(v4) {
                // The first two addresses of IPv4 are, as IPv4-compatible addresses, those of IPv6.
                let endpoint = Endpoint::parse(&format!("http://{form}:8080/hook")).expect(&form);
                let written = endpoint.address().unwrap_or_else(|| panic!("{form} is not read as an address"));
                assert!(written == address || embedded(written) == Some(address) || v4.to_bits() < 2, "{form}");
                assert!(strict(written).is_err(), "{form} of {address} passes");
            }
        }
    }
}

#[test]
fn a_public_ipv4_address_passes_in_every_form() {
    for address in [Ipv4Addr::new(8, 8, 8, 8), Ipv4Addr::new(172, 32, 0, 1), Ipv4Addr::new(11, 0, 0, 0)] {
        for form in forms_of(address) {
            let endpoint = Endpoint::parse(&format!("https://{form}/")).expect(&form);
            assert_eq!(strict(endpoint.address().expect(&form)), Ok(()), "{form}");
        }
    }
}

#[test]
fn a_denied_ipv6_address_is_denied_in_every_form() {
    for special in IPV6 {
        for address in borders(&special.network).0 {
            let IpAddr::V6(v6) = address else { unreachable!("the table is of IPv6") };
            let groups = v6.segments().map(|group| format!("{group:04x}")).join(":");
            for form in [format!("[{v6}]"), format!("[{groups}]"), format!("[{}]", groups.to_uppercase())] {
                let endpoint = Endpoint::parse(&format!("http://{form}:8080/hook")).expect(&form);
                assert_eq!(endpoint.address(), Some(address), "{form}");
                assert!(strict(address).is_err(), "{form}");
            }
            // A zone, and an address without brackets, are not part of a URL.
            let refused = [format!("[{v6}%25eth0]"), format!("[{v6}%eth0]"), format!("[{v6}%1]"), v6.to_string()];
            for form in refused {
                assert!(Endpoint::parse(&format!("http://{form}/hook")).is_err(), "{form}");
            }
        }
    }
}

#[test]
fn what_looks_like_another_host_is_refused_or_read_as_the_host_that_is_called() {
    for text in [
        "http://example.com@127.0.0.1/",
        "http://127.0.0.1@example.com/",
        "http://example.com:80@127.0.0.1/",
        "http://@127.0.0.1/",
        "http://127.0.0.1\\@example.com@10.0.0.1/",
    ] {
        let parsed = Endpoint::parse(text);
        assert!(matches!(parsed, Err(EndpointError::UserInfo)) || parsed.unwrap().host() == "127.0.0.1", "{text}");
    }
    for text in [
        // Numbers that are no address: too large, too many, or no digits of their base.
        "http://4294967296/",
        "http://256.0.0.1/",
        "http://127.0.0.0.1/",
        "http://127.0.0.08/",
        "http://0x7f.0.0.0xg1/",
        "http://1.2.3.4.5/",
        "http://[127.0.0.1]/",
        "http://[::1/",
        "http://[::ffff:127.1]/",
        "http://[v1.::1]/",
        "http://example.com%40127.0.0.1/",
        "http://127.0.0.1%00.example.com/",
        "http://127.0.0.1%2f.example.com/",
        "http:\\\\127.0.0.1\\",
        "http:127.0.0.1",
        "http:///127.0.0.1/",
    ] {
        let parsed = Endpoint::parse(text);
        let is_name = parsed.as_ref().is_ok_and(|endpoint| endpoint.address().is_none());
        assert!(parsed.is_err() || is_name, "{text}: {parsed:?}");
    }
    for (text, host) in [
        ("http://127.0.0.1\\.example.com/", "127.0.0.1"),
        ("http://example.com\\@127.0.0.1/", "example.com"),
        ("http://example.com?@127.0.0.1/", "example.com"),
        ("http://①②⑦.0.0.1/", "127.0.0.1"),
        ("http://127.0.0.1.example.com/", "127.0.0.1.example.com"),
    ] {
        assert_eq!(Endpoint::parse(text).unwrap().host(), host, "{text}");
    }
}

/// Addresses of which many are near the border of a range.
fn addresses() -> impl Strategy<Value = IpAddr> {
    let rows: Vec<Cidr> = IPV4.iter().chain(IPV6).map(|special| special.network).collect();
    let near = (proptest::sample::select(rows), any::<bool>(), -3i128..=3).prop_map(|(row, is_last, step)| {
        let ([first, last], _) = borders(&row);
        match if is_last { last } else { first } {
            IpAddr::V4(v4) => Ipv4Addr::from_bits((i128::from(v4.to_bits()) + step) as u32).into(),
            IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits().wrapping_add_signed(step)).into(),
        }
    });
    let v4 = any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).into());
    let v6 = any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).into());
    let unicast = any::<u128>().prop_map(|bits| Ipv6Addr::from_bits((bits >> 3) | (1 << 125)).into());
    let prefix = prop_oneof![Just(0), Just(0xffff_u128 << 32), Just(0x64_ff9b_u128 << 96)];
    let embedding = (prefix, near.clone()).prop_map(|(prefix, address)| match address {
        IpAddr::V4(v4) => Ipv6Addr::from_bits(prefix | u128::from(v4.to_bits())).into(),
        other => other,
    });
    prop_oneof![near, v4, v6, unicast, embedding]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn the_rule_agrees_with_one_that_is_written_without_the_table(address in addresses()) {
        prop_assert_eq!(strict(address).is_ok(), is_public(address), "{}", address);
    }

    #[test]
    fn a_range_in_the_allow_list_opens_what_it_contains_and_changes_nothing_else(
        address in addresses(),
        bits in any::<u128>(),
        prefix in 0u8..=128,
        is_near in any::<bool>(),
    ) {
        let bits = match address {
            IpAddr::V4(v4) if is_near => u128::from(v4.to_bits()),
            IpAddr::V6(v6) if is_near => v6.to_bits(),
            _ => bits,
        };
        let allowed = match address {
            IpAddr::V4(_) => {
                let prefix = u32::from(prefix.min(32));
                let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                range(&format!("{}/{prefix}", Ipv4Addr::from_bits(bits as u32 & mask)))
            }
            IpAddr::V6(_) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                range(&format!("{}/{prefix}", Ipv6Addr::from_bits(bits & mask)))
            }
        };
        let is_allowed = EgressPolicy::allowing([allowed]).judge(address).is_ok();
        prop_assert_eq!(is_allowed, is_public(address) || allowed.contains(address), "{} with {}", address, allowed);
    }
}

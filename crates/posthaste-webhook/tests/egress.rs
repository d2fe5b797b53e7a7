//! Requests reach only destinations that the egress guard allows. Everything that a denied request would reach listens
//! on this machine and counts its connections.

mod subscriber;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste_core::{Failure, FailureClass, Outcome};
use posthaste_webhook::{
    Client, ClientOptions, EgressDenied, EgressGuard, EgressPolicy, Endpoint, Exchange, Resolve, Resolving,
};

use subscriber::{SHORT, Subscriber, request};

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// Gives the prepared answers, one for each lookup, and the last one again and again.
struct Script {
    answers: Mutex<VecDeque<Vec<SocketAddr>>>,
    lookups: AtomicUsize,
}

impl Script {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let addresses =
            |answer: &&[&str]| answer.iter().map(|text| (text.parse::<IpAddr>().unwrap(), 0).into()).collect();
        Arc::new(Self { answers: Mutex::new(answers.iter().map(addresses).collect()), lookups: AtomicUsize::new(0) })
    }

    fn lookups(&self) -> usize {
        self.lookups.load(Ordering::SeqCst)
    }
}

impl Resolve for Script {
    fn resolve(&self, _: &str) -> Resolving {
        self.lookups.fetch_add(1, Ordering::SeqCst);
        let mut answers = self.answers.lock().unwrap();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        Box::pin(async move { answer.ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
}

fn loopback() -> EgressPolicy {
    EgressPolicy::allowing_loopback()
}

fn client(egress: EgressGuard) -> Client {
    Client::new(ClientOptions { egress, ..ClientOptions::default() })
}

fn assert_denied(exchange: Exchange, cause: &str) -> Failure {
    assert_eq!(exchange.response, None, "a destination that is denied says nothing about the endpoint");
    let Outcome::Failed(failure) = exchange.outcome else { panic!("it was sent") };
    assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Permanent, "egress_denied"), "{failure}");
    assert!(failure.cause.as_deref().is_some_and(|found| found.contains(cause)), "{failure}");
    failure
}

/// Ways to write the address 127.0.0.1.
const LITERALS: [&str; 12] = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.01",
    "%31%32%37.0.0.1",
    "１２７。０。０。１",
    "[::ffff:127.0.0.1]",
];

#[tokio::test]
async fn a_literal_of_any_form_is_judged_before_a_connection_is_made() {
    let mut subscriber = Subscriber::answering(OK).await;
    let unused = Script::new(&[]);
    let strict = client(EgressGuard::with_resolver(EgressPolicy::default(), unused.clone()));
    let allowing = client(EgressGuard::with_resolver(loopback(), unused.clone()));
    let port = subscriber.address.port();
    for scheme in ["http", "https"] {
        for literal in LITERALS {
            let exchange = strict.exchange(request(&format!("{scheme}://{literal}:{port}/hook"))).await;
            assert_denied(exchange, "127.0.0.0/8 (loopback, RFC 1122)");
        }
    }
    assert_eq!(subscriber.connections(), 0);
    for literal in LITERALS {
        let outcome = allowing.post(request(&format!("http://{literal}:{port}/hook"))).await;
        assert_eq!(outcome, Outcome::Delivered, "{literal}");
        subscriber.next().await;
    }
    assert_eq!(unused.lookups(), 0, "an address needs no resolver");
}

#[tokio::test]
async fn the_unspecified_address_does_not_lead_around_the_guard() {
    let subscriber = Subscriber::answering(OK).await;
    // The operating system connects these to itself.
    for literal in ["0.0.0.0", "0", "[::]", "[::ffff:0.0.0.0]"] {
        let request = request(&format!("http://{literal}:{}/", subscriber.address.port()));
        assert_denied(client(EgressGuard::new(loopback())).exchange(request).await, "egress.allow");
    }
    assert_eq!(subscriber.connections(), 0);
}

#[tokio::test]
async fn a_name_is_refused_if_any_of_its_addresses_is_denied() {
    let subscriber = Subscriber::answering(OK).await;
    let port = subscriber.address.port();
    for addresses in [
        &["127.0.0.1"][..],
        &["192.0.1.1", "127.0.0.1"],
        &["127.0.0.1", "192.0.1.1"],
        &["2606:4700:4700::1111", "::1", "192.0.1.1"],
        &["::ffff:127.0.0.1"],
        &["64:ff9b::7f00:1"],
    ] {
        let guard = EgressGuard::with_resolver(EgressPolicy::default(), Script::new(&[addresses]));
        let strict = client(guard.clone());
        let failure = assert_denied(
            strict.exchange(request(&format!("http://internal.example:{port}/?token=s3cret"))).await,
            "the host \"internal.example\" resolves to an address that is denied: ",
        );
        assert!(!failure.to_string().contains("s3cret"), "{failure}");
        let endpoint = Endpoint::parse("https://internal.example/").unwrap();
        assert!(matches!(guard.check(&endpoint).await, Err(EgressDenied::Name { .. })), "{addresses:?}");
    }
    assert_eq!(subscriber.connections(), 0);
}

#[tokio::test]
async fn a_name_of_the_operating_system_is_judged_too() {
    let mut subscriber = Subscriber::answering(OK).await;
    let localhost = || request(&format!("http://localhost:{}/", subscriber.address.port()));
    let (denied, allowed) = (localhost(), localhost());
    assert_denied(client(EgressGuard::default()).exchange(denied).await, "the host \"localhost\" resolves to");
    assert_eq!(subscriber.connections(), 0);
    assert_eq!(client(EgressGuard::new(loopback())).post(allowed).await, Outcome::Delivered);
    subscriber.next().await;
}

#[tokio::test]
async fn a_name_whose_addresses_change_after_the_check_is_judged_again() {
    let subscriber = Subscriber::answering(OK).await;
    let rebinding = Script::new(&[&["192.0.1.1"], &["127.0.0.1"]]);
    let guard = EgressGuard::with_resolver(EgressPolicy::default(), rebinding.clone());
    let request = request(&format!("http://rebinding.example:{}/", subscriber.address.port()));
    assert_eq!(guard.check(&request.endpoint).await, Ok(()), "a public address when it is stored");
    assert_denied(client(guard).exchange(request).await, "127.0.0.1 is not a public address");
    assert_eq!((subscriber.connections(), rebinding.lookups()), (0, 2));
}

#[tokio::test]
async fn a_connection_goes_to_the_addresses_that_were_judged() {
    let mut allowed = Subscriber::answering(OK).await;
    // The second lookup would lead to an address where nothing listens.
    let changing = Script::new(&[&["127.0.0.1"], &["127.0.0.2"]]);
    let egress = EgressGuard::with_resolver(loopback(), changing.clone());
    let outcome = client(egress).post(request(&format!("http://changing.example:{}/", allowed.address.port()))).await;
    assert_eq!(outcome, Outcome::Delivered);
    allowed.next().await;
    assert_eq!(changing.lookups(), 1, "nothing is resolved between the check and the connection");
}

#[tokio::test]
async fn a_pooled_connection_goes_to_the_address_that_was_judged_when_it_was_opened() {
    let subscriber = Subscriber::answering(OK).await;
    let script = Script::new(&[&["127.0.0.1"], &["10.0.0.1"]]);
    let options = ClientOptions {
        egress: EgressGuard::with_resolver(loopback(), script),
        pool_idle_timeout: Duration::from_secs(600),
        ..ClientOptions::default()
    };
    let client = Client::new(options);
    let send = || client.exchange(request(&format!("http://pooled.example:{}/", subscriber.address.port())));
    assert_eq!(send().await.outcome, Outcome::Delivered);
    for _ in 0..10 {
        // A request that finds the connection not back in the pool yet asks for a new one, and is denied.
        let exchange = send().await;
        if exchange.outcome != Outcome::Delivered {
            assert_denied(exchange, "10.0.0.1 is not a public address");
        }
    }
    assert_eq!(subscriber.connections(), 1);
}

#[tokio::test]
async fn a_check_accepts_a_name_that_has_no_addresses_now() {
    let guard = EgressGuard::with_resolver(EgressPolicy::default(), Script::new(&[]));
    let endpoint = Endpoint::parse("https://later.example/hook").unwrap();
    assert_eq!(guard.check(&endpoint).await, Ok(()));
    let Outcome::Failed(failure) = client(guard).post(request("https://later.example/hook")).await else {
        panic!("there is no such host");
    };
    assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Transient, "502"), "{failure}");
}

/// Never ends a lookup, and counts those that have begun.
#[derive(Default)]
struct Hanging(AtomicUsize);

impl Resolve for Hanging {
    fn resolve(&self, _: &str) -> Resolving {
        self.0.fetch_add(1, Ordering::SeqCst);
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn a_check_does_not_wait_for_lookups_that_hang_and_starts_few_of_them() {
    let resolver = Arc::new(Hanging::default());
    let guard = EgressGuard::with_resolver(EgressPolicy::default(), resolver.clone());
    let endpoint = Endpoint::parse("https://hanging.example/").unwrap();
    let checks: Vec<_> = (0..100)
        .map(|_| {
            let (guard, endpoint) = (guard.clone(), endpoint.clone());
            tokio::spawn(async move { guard.check(&endpoint).await })
        })
        .collect();
    for check in checks {
        assert_eq!(check.await.unwrap(), Ok(()));
    }
    assert_eq!(resolver.0.load(Ordering::SeqCst), 16, "a lookup that hangs keeps its place");
    let literal = Endpoint::parse("https://127.0.0.1/").unwrap();
    assert!(guard.check(&literal).await.is_err(), "an address needs no lookup");
}

#[tokio::test]
async fn a_request_whose_name_is_not_resolved_in_time_times_out() {
    let hanging = EgressGuard::with_resolver(EgressPolicy::default(), Arc::new(Hanging::default()));
    let mut request = request("https://hanging.example/");
    request.timeout = SHORT;
    let started = Instant::now();
    let Outcome::Failed(failure) = client(hanging).post(request).await else { panic!("it cannot be sent") };
    assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Transient, "504"));
    assert!(started.elapsed() >= SHORT);
}

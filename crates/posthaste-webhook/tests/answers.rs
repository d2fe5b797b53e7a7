//! The outcome of each response of a subscriber.

mod subscriber;

use std::time::Duration;

use posthaste_core::{FailureClass, Outcome};
use posthaste_webhook::{Auth, Endpoint, Request, ResponseKind};
use subscriber::{SHORT, Subscriber, client, failure_of, read_request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[tokio::test]
async fn every_2xx_is_a_delivery() {
    for status in ["200 OK", "201 Created", "202 Accepted", "299 Whatever"] {
        let subscriber = Subscriber::answering(answer(status, "", b"thanks")).await;
        assert_eq!(client().post(subscriber.request()).await, Outcome::Delivered, "{status}");
    }
    let subscriber = Subscriber::answering("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(client().post(subscriber.request()).await, Outcome::Delivered);
}

#[tokio::test]
async fn every_other_status_is_a_transient_failure_with_its_number() {
    for (status, message) in [
        ("400 Bad Request", "HTTP 400 Bad Request"),
        ("401 Whatever", "HTTP 401 Unauthorized"),
        ("404 Not Found", "HTTP 404 Not Found"),
        ("500 Internal Server Error", "HTTP 500 Internal Server Error"),
        ("503 Service Unavailable", "HTTP 503 Service Unavailable"),
        ("599 Odd", "HTTP 599"),
    ] {
        let subscriber = Subscriber::answering(answer(status, "", b"no such\x1b thing\n")).await;
        let failure = failure_of(subscriber.request()).await;
        assert_eq!((failure.code.as_ref(), failure.message.as_str()), (&status[..3], message));
        assert_eq!(failure.class, FailureClass::Transient);
        assert_eq!(failure.cause.as_deref(), Some("no such thing"));
        assert_eq!(failure.retry_after, None);
    }
}

#[tokio::test]
async fn gone_is_permanent() {
    let failure = failure_of(Subscriber::answering(answer("410 Gone", "", b"")).await.request()).await;
    assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Permanent, "410"));
    assert_eq!(failure.cause, None);
}

#[tokio::test]
async fn retry_after_counts_for_429_and_503_only() {
    for (status, expected) in [
        ("429 Too Many Requests", Some(Duration::from_secs(7))),
        ("503 Service Unavailable", Some(Duration::from_secs(7))),
        ("500 Internal Server Error", None),
        ("404 Not Found", None),
    ] {
        let subscriber = Subscriber::answering(answer(status, "retry-after: 7\r\n", b"")).await;
        assert_eq!(failure_of(subscriber.request()).await.retry_after, expected, "{status}");
    }
    let subscriber = Subscriber::answering(answer("503 Busy", "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n", b""));
    assert_eq!(failure_of(subscriber.await.request()).await.retry_after, Some(Duration::from_secs(3_600)));
    let subscriber = Subscriber::answering(answer("503 Busy", "Retry-After: später\r\n", b"")).await;
    assert_eq!(failure_of(subscriber.request()).await.retry_after, None);
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let target = Subscriber::answering(answer("200 OK", "", b"")).await;
    for status in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let location = format!("location: http://{}/?token=s3cret\r\n", target.address);
        let subscriber = Subscriber::answering(answer(status, &location, b"")).await;
        let failure = failure_of(subscriber.request()).await;
        assert_eq!(failure.code, &status[..3]);
        assert!(failure.message.ends_with("redirects are not followed"), "{failure}");
        assert!(!failure.to_string().contains("s3cret"), "{failure}");
    }
    assert_eq!(target.connections(), 0);
}

#[tokio::test]
async fn compressed_bodies_stay_compressed() {
    // "hello" in gzip.
    let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xcb\x48\xcd\xc9\xc9\x07\0\x86\xa6\x10\x36\x05\0\0\0";
    let mut subscriber = Subscriber::answering(answer("500 Oops", "content-encoding: gzip\r\n", gzip)).await;
    let failure = failure_of(subscriber.request()).await;
    assert!(!failure.cause.unwrap().contains("hello"));
    assert!(subscriber.next().await.header("accept-encoding").is_empty());
}

#[tokio::test]
async fn a_long_body_is_cut_to_one_kibibyte() {
    let subscriber = Subscriber::answering(answer("500 Oops", "", &[b'x'; 3_000])).await;
    assert_eq!(failure_of(subscriber.request()).await.cause.unwrap(), "x".repeat(1_024));
}

/// Responds with a head and then an endless body; reports the bytes written until the connection ended.
async fn endless(head: &'static str, pause: Duration) -> (Subscriber, mpsc::UnboundedReceiver<usize>) {
    let (closed, after) = mpsc::unbounded_channel();
    let subscriber = Subscriber::serving(move |mut stream, _| {
        let closed = closed.clone();
        async move {
            read_request(&mut stream).await.unwrap();
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut written = 0;
            while stream.write_all(&[b'x'; 64]).await.is_ok() {
                written += 64;
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
            }
            let _ = closed.send(written);
        }
    });
    (subscriber.await, after)
}

#[tokio::test]
async fn no_more_than_64_kib_of_a_body_are_awaited_and_the_connection_is_closed() {
    let (subscriber, mut closed) = endless("HTTP/1.1 200 OK\r\n\r\n", Duration::ZERO).await;
    let client = client();
    assert_eq!(client.post(subscriber.request()).await, Outcome::Delivered);
    assert!(closed.recv().await.unwrap() >= 64 * 1_024);

    let (subscriber, mut closed) = endless("HTTP/1.1 500 Oops\r\n\r\n", Duration::ZERO).await;
    assert_eq!(failure_of(subscriber.request()).await.code, "500");
    closed.recv().await.unwrap();
}

#[tokio::test]
async fn a_body_of_64_kib_leaves_the_connection_usable() {
    let subscriber = Subscriber::answering(answer("200 OK", "", &[b'x'; 64 * 1_024])).await;
    let client = client();
    for _ in 0..3 {
        assert_eq!(client.post(subscriber.request()).await, Outcome::Delivered);
    }
    assert_eq!(subscriber.connections(), 1);
}

#[tokio::test]
async fn a_body_that_does_not_end_in_time_is_a_timeout() {
    let (slow, mut closed) = endless("HTTP/1.1 200 OK\r\n\r\n", Duration::from_millis(10)).await;
    let failure = failure_of(Request { timeout: SHORT, ..slow.request() }).await;
    assert_eq!(failure.code, "504");
    assert!(failure.message.contains("was not complete within 2s"), "{failure}");
    closed.recv().await.unwrap();

    let silent = Subscriber::answering_and_hanging("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n").await;
    let failure = failure_of(Request { timeout: SHORT, ..silent.request() }).await;
    assert_eq!(failure.code, "504");
}

#[tokio::test]
async fn a_refusal_keeps_its_status_even_if_its_body_hangs_or_breaks() {
    let head = "HTTP/1.1 410 Gone\r\ncontent-length: 5\r\n\r\n";
    let hanging = Subscriber::answering_and_hanging(head).await;
    let failure = failure_of(Request { timeout: SHORT, ..hanging.request() }).await;
    assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Permanent, "410"));
    let breaking = Subscriber::answering_once_and_closing(head).await;
    assert_eq!(failure_of(breaking.request()).await.code, "410");
}

#[tokio::test]
async fn the_behaviour_of_an_endpoint_does_not_depend_on_what_it_says() {
    let kind = async |request: Request| client().exchange(request).await.response;
    let of = async |subscriber: Subscriber| kind(Request { timeout: SHORT, ..subscriber.request() }).await;
    for complete in [answer("200 OK", "", b""), answer("503 Service Unavailable", "", b"")] {
        assert_eq!(of(Subscriber::answering(complete).await).await, Some(ResponseKind::Responded));
    }
    let broken = "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort";
    assert_eq!(of(Subscriber::answering_once_and_closing(broken).await).await, Some(ResponseKind::Responded));
    let gateway = answer("504 Gateway Timeout", "", b"");
    assert_eq!(of(Subscriber::answering(gateway).await).await, Some(ResponseKind::TimedOut));
    assert_eq!(of(Subscriber::answering_and_hanging("").await).await, Some(ResponseKind::TimedOut));
    assert_eq!(of(Subscriber::answering_once_and_closing("").await).await, Some(ResponseKind::NoConnection));
    let refused = subscriber::request("http://127.0.0.1:1/hook");
    assert_eq!(kind(refused).await, Some(ResponseKind::NoConnection));
}

#[tokio::test]
async fn an_oversized_head_is_502() {
    let large = answer("200 OK", &format!("x: {}\r\n", "y".repeat(64 * 1_024)), b"");
    assert_eq!(failure_of(Subscriber::answering(large).await.request()).await.code, "502");
    let many = answer("200 OK", &"x: y\r\n".repeat(101), b"");
    assert_eq!(failure_of(Subscriber::answering(many).await.request()).await.code, "502");
}

#[tokio::test]
async fn echoed_secrets_do_not_reach_the_failure() {
    // Responds like a debugging service: with the request itself.
    let echo = Subscriber::serving(|mut stream, _| async move {
        let received = read_request(&mut stream).await.unwrap();
        stream.write_all(&answer("500 Oops", "", received.head.as_bytes())).await.unwrap();
        let _ = stream.read(&mut [0; 1]).await;
    })
    .await;
    let secrets = ["open-sesame", "QWxhZGRpbjpvcGVuLXNlc2FtZQ==", "t0ken-in-query", "t0ken-in-header", "be4rer"];
    let basic = Auth::Basic { username: "Aladdin".into(), password: "open-sesame".into() };
    for auth in [basic, Auth::Bearer { token: "be4rer".into() }] {
        let mut request = echo.request();
        request.endpoint = Endpoint::parse(&format!("http://{}/hook?key=t0ken-in-query", echo.address)).unwrap();
        request.auth = auth;
        request.headers =
            vec![("x-api-key".into(), "t0ken-in-header".into()), ("webhook-id".into(), "event-000001".into())];
        let debug = format!("{request:?}");
        let failure = failure_of(request).await;
        let cause = failure.cause.as_deref().unwrap();
        assert!(cause.contains("POST /hook") && cause.contains("event-000001"), "{cause}");
        for secret in secrets {
            assert!(!debug.contains(secret), "{debug}");
            assert!(!format!("{failure} {failure:?}").contains(secret), "{failure}");
        }
    }
}

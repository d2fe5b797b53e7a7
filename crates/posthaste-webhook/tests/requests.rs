//! What a subscriber receives.

mod subscriber;

use bytes::Bytes;
use posthaste_core::Outcome;
use posthaste_webhook::{Auth, Request};
use subscriber::{Subscriber, client, read_request};
use tokio::io::AsyncWriteExt;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

#[tokio::test]
async fn the_head_contains_the_address_and_the_headers_of_the_request() {
    let mut subscriber = Subscriber::answering(OK).await;
    let headers = [("webhook-id", "evt-1"), ("X-Team", "a"), ("x-team", "b")];
    let request = Request {
        endpoint: format!("http://{}/hook/a%20b?x=1&y=%2F", subscriber.address).parse().unwrap(),
        headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        ..subscriber.request()
    };
    assert_eq!(client().post(request).await, Outcome::Delivered);
    let received = subscriber.next().await;
    assert!(received.head.starts_with("POST /hook/a%20b?x=1&y=%2F HTTP/1.1\r\n"), "{}", received.head);
    assert_eq!(received.header("host"), [subscriber.address.to_string()]);
    assert_eq!(received.header("content-type"), ["application/json"]);
    assert_eq!(received.header("user-agent"), [concat!("posthaste/", env!("CARGO_PKG_VERSION"))]);
    assert_eq!(received.header("webhook-id"), ["evt-1"]);
    assert_eq!(received.header("x-team"), ["a", "b"]);
    assert!(received.header("authorization").is_empty());
}

#[tokio::test]
async fn credentials_are_sent_in_the_standard_form() {
    let mut subscriber = Subscriber::answering(OK).await;
    let client = client();
    let basic = Auth::Basic { username: "Aladdin".into(), password: "open sesame".into() };
    for (auth, expected) in [
        (basic, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="),
        (Auth::Bearer { token: "eyJhbGciOi.J9".into() }, "Bearer eyJhbGciOi.J9"),
    ] {
        assert_eq!(client.post(Request { auth, ..subscriber.request() }).await, Outcome::Delivered);
        assert_eq!(subscriber.next().await.header("authorization"), [expected]);
    }
}

#[tokio::test]
async fn the_body_arrives_byte_for_byte() {
    let mut subscriber = Subscriber::answering(OK).await;
    let client = client();
    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    for body in [vec![], b" { \"a\" : 1e400 }\n".to_vec(), every_byte.repeat(4_096)] {
        let request = Request { body: Bytes::from(body.clone()), ..subscriber.request() };
        assert_eq!(client.post(request).await, Outcome::Delivered);
        assert!(subscriber.next().await.body == body);
    }
}

#[tokio::test]
async fn all_clones_reuse_the_same_connections() {
    let subscriber = Subscriber::answering(OK).await;
    let client = client();
    for _ in 0..50 {
        assert_eq!(client.clone().post(subscriber.request()).await, Outcome::Delivered);
    }
    assert_eq!((subscriber.connections(), subscriber.unread()), (1, 50));
}

#[tokio::test]
async fn a_connection_closed_between_requests_causes_no_failure() {
    let subscriber = Subscriber::answering_once_and_closing(OK).await;
    let client = client();
    assert_eq!(client.post(subscriber.request()).await, Outcome::Delivered);
    // The end of the connection reaches the pool when its task runs; the scheduler has nothing else to do.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    for _ in 0..5 {
        assert_eq!(client.post(subscriber.request()).await, Outcome::Delivered);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(subscriber.unread(), 6);
}

#[tokio::test]
async fn a_request_that_arrived_is_never_sent_again() {
    // Responds to the first request of a connection, and closes the connection after it has read the second.
    let subscriber = Subscriber::serving(|mut stream, sender| async move {
        let _ = sender.send(read_request(&mut stream).await.unwrap());
        stream.write_all(OK.as_bytes()).await.unwrap();
        if let Some(second) = read_request(&mut stream).await {
            let _ = sender.send(second);
        }
    })
    .await;
    let client = client();
    assert_eq!(client.post(subscriber.request()).await, Outcome::Delivered);
    let Outcome::Failed(failure) = client.post(subscriber.request()).await else { panic!("there was no response") };
    assert_eq!(failure.code, "502");
    assert_eq!((subscriber.connections(), subscriber.unread()), (1, 2));
}

//! The error map: every way to get no response, and the code of its failure.

mod subscriber;

use std::sync::Arc;

use posthaste_core::{Failure, FailureClass, Outcome};
use posthaste_webhook::{Auth, Client, ClientOptions, Request};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use subscriber::{SHORT, Subscriber, client, failure_of, options, read_request, request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

#[track_caller]
fn assert_failure(failure: &Failure, code: &str, message: &str) {
    assert_eq!(failure.class, FailureClass::Transient, "{failure}");
    assert_eq!(failure.code, code, "{failure}");
    assert!(failure.message.contains(message), "{failure}");
    assert_eq!(failure.retry_after, None);
}

#[tokio::test]
async fn a_name_without_address_is_502() {
    let failure = failure_of(request("http://nobody.invalid/hook?token=s3cret")).await;
    assert_failure(&failure, "502", "cannot resolve host \"nobody.invalid\"");
    assert!(!failure.to_string().contains("s3cret"), "{failure}");
    let failure = failure_of(request("https://nobody.invalid/hook")).await;
    assert_failure(&failure, "502", "cannot resolve host \"nobody.invalid\"");
}

#[tokio::test]
async fn a_refused_connection_is_503() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    for scheme in ["http", "https"] {
        let failure = failure_of(request(&format!("{scheme}://{address}/?token=s3cret"))).await;
        assert_failure(&failure, "503", &format!("connection refused by {address}"));
        assert!(!failure.to_string().contains("s3cret"), "{failure}");
    }
}

#[tokio::test]
async fn a_subscriber_that_does_not_respond_is_504() {
    let subscriber = Subscriber::answering_and_hanging("").await;
    let failure = failure_of(Request { timeout: SHORT, ..subscriber.request() }).await;
    assert_failure(&failure, "504", &format!("no answer from {} within 2s", subscriber.address));
    // A TLS handshake without a response.
    let mut https = request(&format!("https://{}/", subscriber.address));
    https.timeout = SHORT;
    let deaf = Subscriber::serving(|mut stream, _| async move {
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    https.endpoint = format!("https://{}/", deaf.await.address).parse().unwrap();
    assert_failure(&failure_of(https).await, "504", "no answer");
}

#[tokio::test]
async fn an_incomplete_head_is_504() {
    let subscriber = Subscriber::answering_and_hanging("HTTP/1.1 200 OK\r\ncontent-le").await;
    let failure = failure_of(Request { timeout: SHORT, ..subscriber.request() }).await;
    assert_failure(&failure, "504", "no answer");
}

#[tokio::test]
async fn a_listener_that_accepts_no_connection_is_504() {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    // The kernel accepts connections until its queue is full, and then it no longer responds.
    let mut queued = Vec::new();
    while let Ok(stream) = tokio::time::timeout(SHORT, tokio::net::TcpStream::connect(address)).await {
        queued.push(stream.unwrap());
    }
    let client = Client::new(ClientOptions { connect_timeout: SHORT, ..options() });
    let Outcome::Failed(failure) = client.post(request(&format!("http://{address}/"))).await else {
        panic!("delivered without a connection");
    };
    assert_failure(&failure, "504", &format!("no connection to {address} within 2s"));
}

#[tokio::test]
async fn plain_text_instead_of_tls_is_525() {
    let subscriber = Subscriber::serving(|mut stream, _| async move {
        let _ = stream.read(&mut [0; 1_024]).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let address = subscriber.await.address;
    let failure = failure_of(request(&format!("https://{address}/?token=s3cret"))).await;
    assert_failure(&failure, "525", &format!("TLS with {address} failed"));
    assert!(!failure.to_string().contains("s3cret"), "{failure}");
}

#[tokio::test]
async fn a_handshake_cut_short_is_525() {
    let subscriber = Subscriber::serving(|mut stream, _| async move {
        let _ = stream.read(&mut [0; 1_024]).await;
    });
    let failure = failure_of(request(&format!("https://{}/", subscriber.await.address))).await;
    assert_failure(&failure, "525", "TLS");
}

/// A subscriber with a certificate for `name` that it signed itself.
async fn tls_subscriber(name: &str) -> (Subscriber, CertificateDer<'static>) {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed([name.to_owned()]).unwrap();
    let certificate = cert.der().clone();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(tokio_rustls::rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let subscriber = Subscriber::serving(move |stream, sender| {
        let acceptor = acceptor.clone();
        async move {
            let Ok(mut stream) = acceptor.accept(stream).await else { return };
            while let Some(received) = read_request(&mut stream).await {
                let _ = sender.send(received);
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            }
        }
    });
    (subscriber.await, certificate)
}

#[tokio::test]
async fn an_unknown_authority_is_525_and_receives_no_request() {
    let (subscriber, _) = tls_subscriber("localhost").await;
    let mut request = request(&format!("https://localhost:{}/", subscriber.address.port()));
    request.auth = Auth::Bearer { token: "s3cret".into() };
    let failure = failure_of(request).await;
    assert_failure(&failure, "525", "TLS with localhost");
    assert!(failure.cause.as_deref().unwrap().contains("UnknownIssuer"), "{failure}");
    assert_eq!(subscriber.unread(), 0);
}

#[tokio::test]
async fn trusted_authorities_are_accepted_for_their_names_only() {
    let (mut subscriber, certificate) = tls_subscriber("localhost").await;
    let trusting = ClientOptions { extra_roots: vec![certificate], ..options() };
    let client = Client::new(trusting.clone());
    let port = subscriber.address.port();
    assert_eq!(client.post(request(&format!("https://localhost:{port}/hook"))).await, Outcome::Delivered);
    assert!(subscriber.next().await.head.starts_with("POST /hook HTTP/1.1\r\n"));
    let Outcome::Failed(failure) = client.post(request(&format!("https://127.0.0.1:{port}/hook"))).await else {
        panic!("the certificate is not for 127.0.0.1");
    };
    assert_failure(&failure, "525", "TLS");
}

#[tokio::test]
async fn a_response_that_is_not_http_is_502() {
    for garbage in
        ["SSH-2.0-OpenSSH_9.6\r\n", "HTTP/1.1 banana\r\n\r\n", "\0\x01\x02\x03\r\n\r\n", "HTTP/9.9 200 OK\r\n\r\n"]
    {
        let subscriber = Subscriber::answering_once_and_closing(garbage).await;
        let failure = failure_of(subscriber.request()).await;
        assert_failure(&failure, "502", &subscriber.address.to_string());
    }
}

#[tokio::test]
async fn a_connection_closed_early_is_502() {
    let mut answers = vec!["", "HTTP/1.1 200 OK\r\ncont"];
    answers.push("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf");
    answers.push("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel");
    answers.push("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello");
    for answer in answers {
        let subscriber = Subscriber::answering_once_and_closing(answer).await;
        let failure = failure_of(subscriber.request()).await;
        assert_failure(&failure, "502", "before its answer was complete");
    }
}

#[tokio::test]
async fn a_reset_is_502() {
    for answer in ["", "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"] {
        let subscriber = Subscriber::serving(move |mut stream, _| async move {
            read_request(&mut stream).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Closing without lingering sends a reset.
            stream.set_zero_linger().unwrap();
        });
        let failure = failure_of(subscriber.await.request()).await;
        assert_failure(&failure, "502", "closed the connection");
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_written_is_permanent() {
    let subscriber = Subscriber::answering("HTTP/1.1 200 OK\r\n\r\n").await;
    let bad_token = Request { auth: Auth::Bearer { token: "s3cret\r\n".into() }, ..subscriber.request() };
    let bad_type = Request { content_type: "a\nb".into(), ..subscriber.request() };
    let bad_header = Request { headers: vec![("x y".into(), "s3cret".into())], ..subscriber.request() };
    let smuggled = Request { headers: vec![("Content-Length".into(), "1".into())], ..subscriber.request() };
    for request in [bad_token, bad_type, bad_header, smuggled] {
        let Outcome::Failed(failure) = client().post(request).await else { panic!("sent") };
        assert_eq!((failure.class, failure.code.as_ref()), (FailureClass::Permanent, "unbuildable"));
        assert!(!format!("{failure:?}").contains("s3cret"), "{failure}");
    }
    assert_eq!(subscriber.connections(), 0);
}

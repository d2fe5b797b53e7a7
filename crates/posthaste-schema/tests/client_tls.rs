//! The client reaches a registry by https, and trusts only certificates of known authorities.

use std::sync::Arc;

use posthaste_schema::{ClientOptions, RegistryClient, RegistryError, SchemaRegistry};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

/// A registry with a certificate for `localhost` that it made itself.
async fn start() -> (String, CertificateDer<'static>) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key.into())
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            // A client that does not trust the certificate ends the handshake.
            let Ok(mut connection) = acceptor.accept(connection).await else { continue };
            let mut request = [0; 4096];
            let _ = connection.read(&mut request).await;
            let body = "{\"compatibilityLevel\": \"NONE\"}";
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
            let _ = connection.write_all(format!("{head}{body}").as_bytes()).await;
            let _ = connection.shutdown().await;
        }
    });
    (url, certificate)
}

#[tokio::test]
async fn only_certificates_of_known_authorities_are_trusted() {
    let (url, certificate) = start().await;
    let mut options = ClientOptions::new(&url).unwrap();
    options.attempts = 1;
    let error = RegistryClient::new(options.clone()).check().await.unwrap_err();
    assert!(
        matches!(&error, RegistryError::Unavailable { reason } if reason.to_lowercase().contains("certificate")),
        "{error}"
    );
    options.extra_roots.push(certificate);
    RegistryClient::new(options).check().await.unwrap();
}

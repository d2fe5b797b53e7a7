//! The client against a registry that fails in every way: it never returns a wrong id, and works again afterwards.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste_core::lock;
use posthaste_schema::{ClientOptions, Credentials, RegistryClient, RegistryError, SchemaRegistry, SchemaText};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const JSON: &str = "application/vnd.schemaregistry.v1+json";

/// What the server does with a request.
#[derive(Clone)]
enum Behaviour {
    Answer(u16, &'static str, String),
    /// The head of an answer and a part of its body.
    CutOff,
    /// A body that does not end.
    Endless,
    /// No answer.
    Hang,
    /// The connection is closed.
    Close,
    /// Something that is not HTTP.
    Garbage,
}

/// A real HTTP server with one behaviour at a time.
struct Server {
    url: String,
    behaviour: Arc<Mutex<Vec<Behaviour>>>,
    requests: Arc<AtomicUsize>,
    /// The head of the last request.
    last: Arc<Mutex<String>>,
}

impl Server {
    /// The last behaviour stays; those before it are for one request each.
    async fn start(behaviour: Vec<Behaviour>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/api", listener.local_addr().unwrap());
        let behaviour = Arc::new(Mutex::new(behaviour));
        let (requests, last) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(String::new())));
        let server = Self { url, behaviour: behaviour.clone(), requests: requests.clone(), last: last.clone() };
        tokio::spawn(async move {
            while let Ok((connection, _)) = listener.accept().await {
                let (behaviour, requests, last) = (behaviour.clone(), requests.clone(), last.clone());
                tokio::spawn(async move {
                    let mut connection = connection;
                    *lock(&last) = read_request(&mut connection).await;
                    requests.fetch_add(1, Ordering::Relaxed);
                    let next = {
                        let mut all = lock(&behaviour);
                        if all.len() > 1 { all.remove(0) } else { all[0].clone() }
                    };
                    serve(connection, next).await;
                });
            }
        });
        server
    }

    fn become_well(&self, body: &str) {
        *lock(&self.behaviour) = vec![Behaviour::Answer(200, JSON, body.to_owned())];
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Reads the head and the body of a request and returns the head.
async fn read_request(connection: &mut TcpStream) -> String {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let count = connection.read(&mut buffer).await.unwrap_or(0);
        request.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&request).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            if count == 0 {
                return text;
            }
            continue;
        };
        let lengths = head
            .lines()
            .filter_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok());
        if count == 0 || body.len() >= lengths.sum::<usize>() {
            return head.to_owned();
        }
    }
}

async fn serve(mut connection: TcpStream, behaviour: Behaviour) {
    // The client may close the connection at any time.
    let _ = match behaviour {
        Behaviour::Answer(status, content, body) => {
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {content}\r\ncontent-length: {length}\r\n");
            connection.write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes()).await
        }
        Behaviour::CutOff => connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"id\": 1").await,
        Behaviour::Endless => {
            let mut sent = connection.write_all(b"HTTP/1.1 200 OK\r\n\r\n{\"id\": 1").await;
            while sent.is_ok() {
                sent = connection.write_all(&[b'1'; 16 * 1024]).await;
            }
            sent
        }
        Behaviour::Hang => std::future::pending().await,
        Behaviour::Close => Ok(()),
        Behaviour::Garbage => connection.write_all(b"SSH-2.0-OpenSSH\r\n").await,
    };
}

fn options(url: &str) -> ClientOptions {
    let mut options = ClientOptions::new(url).unwrap();
    options.request_timeout = Duration::from_millis(500);
    options.first_pause = Duration::from_millis(1);
    options.failure_memory = Duration::ZERO;
    options.replica_lag = Duration::ZERO;
    options
}

fn schema() -> SchemaText {
    SchemaText { text: "message A {}".to_owned(), references: Vec::new() }
}

fn reason(error: RegistryError) -> String {
    match error {
        RegistryError::Unavailable { reason } => reason,
        error => panic!("not an outage: {error:?}"),
    }
}

fn answer(status: u16, body: &str) -> Behaviour {
    Behaviour::Answer(status, JSON, body.to_owned())
}

fn html(status: u16) -> Behaviour {
    Behaviour::Answer(status, "text/html", "<html>Welcome</html>".to_owned())
}

#[tokio::test]
async fn every_fault_is_an_outage_and_the_client_recovers() {
    let faults = [
        (answer(500, "{\"error_code\": 50001, \"message\": \"oops\"}"), "500"),
        (answer(503, ""), "503"),
        (answer(429, ""), "429"),
        (html(200), "no JSON"),
        (html(404), "may not be a schema registry"),
        (html(302), "302"),
        (answer(200, "{\"id\": 1"), "cut off"),
        (answer(200, "{\"id\": \"one\"}"), "other JSON"),
        (answer(200, "{\"id\": 0}"), "schema id 0"),
        (answer(200, "{\"id\": 99999999999}"), "other JSON"),
        (answer(200, "[]"), "other JSON"),
        (answer(200, ""), "cut off"),
        (answer(401, "{\"error_code\": 401, \"message\": \"who\"}"), "credentials"),
        (answer(404, "{\"error_code\": 404, \"message\": \"no route\"}"), "404"),
        (Behaviour::CutOff, "127.0.0.1"),
        (Behaviour::Endless, "more than 2097152 bytes"),
        (Behaviour::Hang, "no complete answer within 500ms"),
        (Behaviour::Close, "127.0.0.1"),
        (Behaviour::Garbage, "127.0.0.1"),
    ];
    for (fault, expected) in faults {
        let server = Server::start(vec![fault]).await;
        let client = RegistryClient::new(options(&server.url));
        let text = reason(client.register("orders-value", &schema()).await.unwrap_err());
        assert!(text.contains(expected) && text.contains(&server.url), "{text}");
        reason(client.schema(1).await.unwrap_err());
        reason(client.check().await.unwrap_err());
        server.become_well("{\"id\": 7}");
        assert_eq!(client.register("orders-value", &schema()).await.unwrap(), 7);
        server.become_well("{\"schemaType\": \"PROTOBUF\", \"schema\": \"message A {}\"}");
        assert_eq!(client.schema(1).await.unwrap().unwrap().message_name(&[0]), Some("A"));
    }
}

#[tokio::test]
async fn short_faults_are_overcome_by_repetition() {
    let faults = vec![answer(500, ""), Behaviour::Close, answer(200, "{\"id\": 7}")];
    let server = Server::start(faults).await;
    let client = RegistryClient::new(options(&server.url));
    assert_eq!(client.register("orders-value", &schema()).await.unwrap(), 7);
    assert_eq!(server.requests(), 3);
}

#[tokio::test]
async fn a_registry_that_is_down_fails_at_once_and_is_tried_again_later() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let mut slow = options(&url);
    slow.first_pause = Duration::from_millis(200);
    slow.failure_memory = Duration::from_secs(3600);
    let client = RegistryClient::new(slow);
    let text = reason(client.register("orders-value", &schema()).await.unwrap_err());
    assert!(text.contains("refused"), "{text}");
    // The first call made pauses of 200 and 400 ms. A thousand more would make them, too, without the memory.
    let started = Instant::now();
    for id in 0..1_000 {
        reason(client.schema(id).await.unwrap_err());
    }
    assert!(started.elapsed() < Duration::from_millis(600), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_url_that_does_not_work_is_passed_over() {
    let hanging = Server::start(vec![Behaviour::Hang]).await;
    let failing = Server::start(vec![answer(500, "")]).await;
    let well = Server::start(vec![answer(200, "{\"id\": 7}")]).await;
    let client = RegistryClient::new(options(&format!("{}, {},{}", hanging.url, failing.url, well.url)));
    assert_eq!(client.register("orders-value", &schema()).await.unwrap(), 7);
    assert_eq!(client.register("payments-value", &schema()).await.unwrap(), 7);
    assert_eq!((hanging.requests(), failing.requests(), well.requests()), (1, 1, 2), "the URL that works is kept");
}

#[tokio::test]
async fn refusals_are_told_apart_from_outages() {
    let body = |code: u32| format!("{{\"error_code\": {code}, \"message\": \"because\"}}");
    let server = Server::start(vec![answer(409, &body(409))]).await;
    let client = RegistryClient::new(options(&server.url));
    let incompatible = client.register("orders-value", &schema()).await.unwrap_err();
    assert_eq!(incompatible, RegistryError::Incompatible { reason: "because".to_owned() });
    *lock(&server.behaviour) = vec![answer(422, &body(42201))];
    let refused = client.register("orders-value", &schema()).await.unwrap_err();
    assert_eq!(refused, RegistryError::Refused { reason: "because".to_owned() });
    *lock(&server.behaviour) = vec![answer(404, &body(40403))];
    assert!(client.schema(1).await.unwrap().is_none());
    server.become_well("{\"schema\": \"\\\"string\\\"\"}");
    let avro = client.schema(1).await.unwrap_err();
    assert!(matches!(&avro, RegistryError::Refused { reason } if reason.contains("AVRO")), "{avro}");
    server.become_well("{\"schemaType\": \"PROTOBUF\", \"schema\": \"message\"}");
    let broken = client.schema(2).await.unwrap_err();
    assert!(matches!(&broken, RegistryError::Refused { reason } if reason.contains("not valid Protobuf")), "{broken}");
}

#[tokio::test]
async fn ids_are_looked_up_once_and_unknown_ids_at_most_once_a_second() {
    let found = "{\"schemaType\": \"PROTOBUF\", \"schema\": \"message A {}\"}";
    let server = Server::start(vec![answer(200, found)]).await;
    let mut remembering = options(&server.url);
    remembering.failure_memory = Duration::from_secs(3600);
    let client = RegistryClient::new(remembering);
    let look_ups = futures_util::future::join_all((0..50).map(|_| client.schema(1))).await;
    assert!(look_ups.iter().all(|schema| schema.as_ref().unwrap().is_some()));
    client.schema(1).await.unwrap();
    assert_eq!(server.requests(), 1);
    *lock(&server.behaviour) = vec![answer(404, "{\"error_code\": 40403, \"message\": \"unknown\"}")];
    for _ in 0..50 {
        assert!(client.schema(2).await.unwrap().is_none());
    }
    assert_eq!(server.requests(), 2);
    server.become_well("{\"id\": 7}");
    for _ in 0..50 {
        assert_eq!(client.register("orders-value", &schema()).await.unwrap(), 7);
    }
    assert_eq!(server.requests(), 3);
}

#[tokio::test]
async fn an_id_that_one_replica_does_not_know_yet_is_looked_up_at_the_others() {
    let unknown = answer(404, "{\"error_code\": 40403, \"message\": \"unknown\"}");
    let found = answer(200, "{\"schemaType\": \"PROTOBUF\", \"schema\": \"message A {}\"}");
    let (lagging, leading) = (Server::start(vec![unknown]).await, Server::start(vec![found]).await);
    let mut patient = options(&format!("{},{}", lagging.url, leading.url));
    patient.replica_lag = Duration::from_secs(3600);
    let client = RegistryClient::new(patient);
    let outage = client.schema(1).await.unwrap_err();
    assert!(matches!(&outage, RegistryError::Unavailable { reason } if reason.contains("id 1 yet")), "{outage}");
    assert!(client.schema(1).await.unwrap().is_some());
    let client = RegistryClient::new(options(&lagging.url));
    assert!(client.schema(1).await.unwrap().is_none(), "there is no such schema");
}

#[tokio::test]
async fn credentials_and_escaped_subjects_are_sent() {
    let server = Server::start(vec![answer(200, "{\"id\": 7}")]).await;
    let url = server.url.replace("http://", "http://me:secret@");
    let client = RegistryClient::new(options(&url));
    client.register("a/b c?-value", &schema()).await.unwrap();
    let head = lock(&server.last).to_ascii_lowercase();
    assert!(head.starts_with("post /api/subjects/a%2fb%20c%3f-value/versions http/1.1"), "{head}");
    assert!(head.contains("authorization: basic bwu6c2vjcmv0"), "{head}");
    server.become_well("{\"compatibilityLevel\": \"BACKWARD\"}");
    let token = Credentials::Bearer { token: "t0ken".to_owned() };
    let client = RegistryClient::new(options(&server.url).credentials(&token).unwrap());
    client.check().await.unwrap();
    let head = lock(&server.last).to_ascii_lowercase();
    assert!(head.starts_with("get /api/config http/1.1") && head.contains("authorization: bearer t0ken"), "{head}");
}

//! Kafka.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::sync::OnceCell;

use super::Cutter;
use super::watched::{CrashableServer, Server, free_port};

const SCRIPT: &str = concat!(include_str!("kafka.sh"), include_str!("watch.sh"));

/// The broker of a throwaway Kafka, as host:port, and a prefix for the names of topics and groups that no other caller
/// has. One server for a test binary.
pub async fn kafka() -> (String, String) {
    static SERVER: OnceCell<Server> = OnceCell::const_new();
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let server = SERVER.get_or_init(|| Server::start(SCRIPT, "")).await;
    (format!("127.0.0.1:{}", server.port()), format!("test{}.", NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// A Kafka of one broker for one test. A crash is a `kill -9`.
pub struct Kafka;

impl Kafka {
    /// Starts an empty broker. Its URL is its address as host:port.
    pub async fn start() -> CrashableServer {
        let server = Server::start(SCRIPT, "").await;
        let address = format!("127.0.0.1:{}", server.port());
        CrashableServer::new(server, address)
    }

    /// Starts an empty broker that accepts only clients with this name and password (SASL PLAIN, without TLS). Its URL is
    /// its address as host:port.
    pub async fn start_with_password(name: &str, password: &str) -> CrashableServer {
        let port = free_port();
        let login = format!(
            "org.apache.kafka.common.security.plain.PlainLoginModule required username=\"broker\" password=\"b\" \
             user_broker=\"b\" user_{name}=\"{password}\";"
        );
        let settings = [
            format!("listeners=SASL_PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{}", controller_of(port)),
            format!("advertised.listeners=SASL_PLAINTEXT://127.0.0.1:{port}"),
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT".to_owned(),
            "inter.broker.listener.name=SASL_PLAINTEXT".to_owned(),
            "sasl.mechanism.inter.broker.protocol=PLAIN".to_owned(),
            "sasl.enabled.mechanisms=PLAIN".to_owned(),
            format!("listener.name.sasl_plaintext.plain.sasl.jaas.config={}", login.replace(' ', "\\u0020")),
        ];
        let server = Server::start_on(port, SCRIPT, &settings.join(" ")).await;
        CrashableServer::new(server, format!("127.0.0.1:{port}"))
    }

    /// Starts an empty broker, and a proxy through which all its clients connect: the broker tells them the address of
    /// the proxy. The URLs are `kafka://` and the address.
    pub async fn start_behind_proxy() -> (CrashableServer, Cutter) {
        let port = free_port();
        let url = format!("kafka://127.0.0.1:{port}");
        let cutter = Cutter::to(&url).await;
        let advertised = cutter.url().replacen("kafka:", "advertised.listeners=PLAINTEXT:", 1);
        let server = Server::start_on(port, SCRIPT, &advertised).await;
        (CrashableServer::new(server, url), cutter)
    }
}

/// A Kafka of three brokers for one test. Every topic has three replicas, of which two must have a record before it is
/// acked, so the cluster works with two brokers, too.
pub struct KafkaCluster {
    brokers: Vec<Server>,
}

impl KafkaCluster {
    /// Starts three empty brokers.
    pub async fn start() -> Self {
        let ports = [free_port(), free_port(), free_port()];
        let voter = |(index, port): (usize, &u16)| format!("{}@127.0.0.1:{}", index + 1, controller_of(*port));
        let voters: Vec<String> = ports.iter().enumerate().map(voter).collect();
        let settings = |id: usize| {
            [
                &*format!("node.id={id} controller.quorum.voters={}", voters.join(",")),
                "default.replication.factor=3 min.insync.replicas=2 offsets.topic.replication.factor=3",
                "transaction.state.log.replication.factor=3 transaction.state.log.min.isr=2",
                // The others take over from a broker that was not heard of for this long.
                "broker.session.timeout.ms=4000 broker.heartbeat.interval.ms=500",
            ]
            .join(" ")
        };
        // None of them starts without another one.
        let settings = [settings(1), settings(2), settings(3)];
        let start = |index: usize| Server::start_on(ports[index], SCRIPT, &settings[index]);
        let (first, second, third) = tokio::join!(start(0), start(1), start(2));
        Self { brokers: vec![first, second, third] }
    }

    /// The addresses of the brokers, as `kafka://` and a list of host:port.
    pub fn url(&self) -> String {
        let addresses: Vec<String> = self.brokers.iter().map(|broker| format!("127.0.0.1:{}", broker.port())).collect();
        format!("kafka://{}", addresses.join(","))
    }

    /// Kills the broker with this id (`kill -9`).
    pub async fn kill(&self, id: i32) {
        self.broker(id).stop().await;
    }

    /// Starts a broker that was killed, with the data it left.
    pub async fn start_again(&self, id: i32) {
        self.broker(id).start_again().await;
    }

    fn broker(&self, id: i32) -> &Server {
        &self.brokers[usize::try_from(id - 1).expect("the ids of brokers start at 1")]
    }
}

/// The port of the controller in a broker, as the script chooses it.
fn controller_of(port: u16) -> u16 {
    port - 12_000
}

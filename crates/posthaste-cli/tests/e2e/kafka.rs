//! What only a bus outside of the database can do: be away.

use std::collections::HashSet;
use std::process::Command;
use std::time::{Duration, Instant};

use posthaste_backend_tests::servers::{self, Kafka};
use serde_json::Value;

use crate::api::Api;
use crate::process::{Backend, Installation, until};
use crate::subscriber::{Arrival, Subscriber};

async fn readiness(api: &Api) -> Option<(u16, Value)> {
    let answer = api.get("/readyz").await.ok()?;
    Some((answer.status, answer.json()))
}

/// Waits until the server has this status, which always is a 200.
async fn wait_for_status(api: &Api, expected: &str) -> Value {
    until(&format!("the server is {expected}"), async || {
        let (status, readiness) = readiness(api).await?;
        assert_eq!(status, 200, "{readiness}");
        (readiness["status"] == expected).then_some(readiness)
    })
    .await
}

async fn wait_for_every(ids: &HashSet<String>, subscriber: &Subscriber) {
    let have_all_arrived = |arrivals: &[Arrival]| {
        let arrived: HashSet<&str> = arrivals.iter().map(|arrival| arrival.event_id.as_str()).collect();
        ids.iter().all(|id| arrived.contains(id.as_str()))
    };
    subscriber.wait_until("every event", have_all_arrived).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_accepted_while_the_broker_is_away_and_delivered_when_it_is_back() {
    let mut kafka = Kafka::start().await;
    let mut installation = Installation::new(&[]);
    installation.use_kafka(kafka.url(), "away");
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let mut ids = HashSet::from([server.api.publish("order.placed", "1").await]);
    subscriber.wait_for(1).await;

    kafka.stop().await;
    let degraded = wait_for_status(&server.api, "degraded").await;
    assert_eq!(degraded["parts"]["bus"]["status"], "degraded", "{degraded}");
    for _ in 0..20 {
        ids.insert(server.api.publish("order.placed", "2").await);
    }
    let asked = Instant::now();
    let metrics = server.api.get("/metrics").await.unwrap().text;
    assert!(metrics.contains("posthaste_dlt_depth"), "{metrics}");
    assert!(asked.elapsed() < Duration::from_secs(8), "metrics wait for a bus that is away: {:?}", asked.elapsed());

    let topics = server.api.get("/api/topics").await.unwrap();
    assert_eq!((topics.status, &topics.json()["code"]), (503, &Value::from("bus_unavailable")), "{}", topics.text);

    kafka.start_again().await;
    wait_for_every(&ids, &subscriber).await;
    wait_for_status(&server.api, "ready").await;
    assert!(server.terminate().await.success(), "{}", installation.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_logs_in_to_the_broker_with_a_password_from_a_file() {
    let kafka = Kafka::start_with_password("posthaste", "s3cret").await;
    let folder = tempfile::tempdir().unwrap();
    let (right, wrong) = (folder.path().join("right"), folder.path().join("wrong"));
    std::fs::write(&right, "s3cret\n").unwrap();
    std::fs::write(&wrong, "guessed\n").unwrap();
    let url = format!("kafka://{}", kafka.url());
    let file = |path: &std::path::Path| format!("file:{}", path.display());
    let settings = |password: &str| {
        let settings = [
            ("URL", url.as_str()),
            ("REPLICATION", "1"),
            ("KAFKA__SECURITY_PROTOCOL", "sasl_plaintext"),
            ("KAFKA__SASL_MECHANISM", "PLAIN"),
            ("KAFKA__SASL_USERNAME", "posthaste"),
            ("KAFKA__SASL_PASSWORD", password),
        ];
        settings.map(|(key, value)| (key.to_owned(), value.to_owned()))
    };
    let wrong = settings(&file(&wrong));
    let (code, found) = check(&wrong.each_ref().map(|(key, value)| (key.as_str(), value.as_str())));
    assert!(code == 3 && found.contains("uthentication") && !found.contains("guessed"), "{code}: {found}");

    let mut installation = Installation::new(&[]);
    settings(&file(&right)).iter().for_each(|(key, value)| installation.set(&format!("BUS__{key}"), value));
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    assert_eq!(subscriber.wait_for(1).await[0].event_id, id);
    assert!(server.terminate().await.success(), "{}", installation.log());
    assert!(!installation.log().contains("s3cret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_starts_while_the_broker_is_away() {
    let mut kafka = Kafka::start().await;
    kafka.stop().await;
    let mut installation = Installation::new(&[]);
    installation.use_kafka(kafka.url(), "later");
    let begun = Instant::now();
    let server = installation.start().await;
    assert!(begun.elapsed() < Duration::from_secs(10), "the start waits for the broker: {:?}", begun.elapsed());
    wait_for_status(&server.api, "degraded").await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    kafka.start_again().await;
    assert_eq!(subscriber.wait_for(1).await[0].event_id, id);
    assert!(server.terminate().await.success(), "{}", installation.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_repeats_only_what_was_in_flight() {
    let installation = Installation::on(Backend::Kafka, &[]).await;
    let subscriber = Subscriber::start().await;
    let server = installation.start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let mut ids = HashSet::new();
    for _ in 0..200 {
        ids.insert(server.api.publish("order.placed", "1").await);
    }
    subscriber.wait_for(200).await;
    // Everything is settled when the groups have no backlog.
    until("the groups have done everything", async || {
        let topics = server.api.get("/api/topics").await.unwrap().json();
        let mut groups = topics["items"].as_array()?.iter().flat_map(|topic| {
            let partitions = topic["partitions"].as_array().expect("partitions").iter();
            partitions.flat_map(|partition| partition["groups"].as_array().expect("groups").iter())
        });
        groups.all(|group| group["lag"] == 0).then_some(())
    })
    .await;
    for _ in 0..200 {
        ids.insert(server.api.publish("order.placed", "2").await);
    }
    server.kill();
    let settled: HashSet<String> =
        subscriber.arrivals().into_iter().take(200).map(|arrival| arrival.event_id).collect();
    let arrived_before = subscriber.arrivals().len();
    let server = installation.start().await;
    wait_for_every(&ids, &subscriber).await;
    let again = subscriber.arrivals()[arrived_before..].iter().filter(|it| settled.contains(&it.event_id)).count();
    assert_eq!(again, 0, "settled deliveries were repeated");
    assert!(server.terminate().await.success(), "{}", installation.log());
}

fn check(settings: &[(&str, &str)]) -> (i32, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthaste"));
    command.args(["check", "--listen", "127.0.0.1:0"]).current_dir(folder.path());
    command.envs(settings.iter().map(|(key, value)| (format!("POSTHASTE__BUS__{key}"), *value)));
    let ran = command.output().unwrap();
    (ran.status.code().unwrap(), String::from_utf8_lossy(&ran.stdout).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn check_says_what_is_wrong_with_the_cluster() {
    let (broker, prefix) = servers::kafka().await;
    let (url, prefix) = (format!("kafka://{broker}"), prefix.trim_end_matches('.'));
    let (code, found) = check(&[("URL", &url), ("REPLICATION", "1"), ("TOPIC_PREFIX", prefix)]);
    assert!(code == 0 && found.contains("1 brokers, 0 topics"), "{code}: {found}");
    let (code, found) = check(&[("URL", &url), ("TOPIC_PREFIX", prefix)]);
    assert!(code == 1 && found.contains("bus.replication is 3, but the cluster has 1 brokers"), "{code}: {found}");
    let (code, found) = check(&[("URL", "kafka://127.0.0.1:1"), ("TOPIC_PREFIX", prefix)]);
    assert!(code == 3 && found.contains("no broker of 127.0.0.1:1 answers"), "{code}: {found}");
    let (code, found) = check(&[("URL", &url), ("KAFKA__SASL_PASSWORD", "file:no/such/file")]);
    assert!(code == 2 && found.contains("no/such/file, which cannot be read"), "{code}: {found}");
    let (code, found) = check(&[("URL", &url), ("KAFKA__LINGER", "5")]);
    assert!(code == 2 && found.contains("linger"), "{code}: {found}");
    let (code, found) = check(&[("URL", &url), ("KAFKA__GROUP_ID", "mine")]);
    assert!(code == 2 && found.contains("group.id is set by posthaste itself: remove it"), "{code}: {found}");
}

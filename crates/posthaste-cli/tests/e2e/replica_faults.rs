//! Two servers on one PostgreSQL database, and a fault in the middle: of a server, of the database, or of Kafka.
//!
//! Each test has four rounds of events, of which none is lost. The first is settled before the fault, and the last follows
//! when the installation is ready again: both arrive once. The deliveries of the second round wait for the subscriber, which
//! hangs, when the fault happens: only requests that were under way are repeated. The third round is published across the
//! fault, so any step of it may be repeated.

use std::collections::HashSet;
use std::time::Duration;

use posthaste_backend_tests::servers::{CrashableServer, Kafka, Postgres, apicurio};
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::api::Api;
use crate::process::{Backend, Installation, Server, until};
use crate::replicas::{TYPES, event_type, wait_for_every, wait_until_acked, wait_until_all_is_acked};
use crate::subscriber::Subscriber;

/// How many events of a round are published through each server. Those of both are as many as the subscriptions may have
/// requests at once. More would become dead letters: one that is published just before the fault, and whose record is not
/// acked, is repeated rightly.
const EVENTS: usize = 8 * TYPES;
/// A client that gets no answer for this long asks another server.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// An event of the round that is published across the fault.
const ACROSS: &str = "SELECT 1 FROM outbox_event WHERE event_id LIKE 'across-%' LIMIT 1";

const SETTINGS: [(&str, &str); 3] =
    [("OUTBOX__LEASE", "3s"), ("DELIVERY__CONCURRENCY", "16"), ("DLT__RETRY_INTERVAL", "500ms")];

/// Two servers and their subscriber, after the first round.
struct Scene {
    installations: [Installation; 2],
    servers: [Option<Server>; 2],
    subscriber: Subscriber,
    first: HashSet<String>,
    /// The events of which a request had been sent when the fault happened.
    under_way: HashSet<String>,
    /// How many events of the second round may be repeated, if one server fails.
    most_repeated: Option<usize>,
}

impl Scene {
    async fn start(installation: Installation) -> Self {
        let replica = installation.replica();
        let (one, other) = tokio::join!(installation.start(), replica.start());
        let subscriber = Subscriber::start().await;
        for place in 0..TYPES {
            one.api.subscribe(&event_type(place), "billing", &subscriber.endpoint()).await;
        }
        let installations = [installation, replica];
        let first = publish(&installations, "first").await;
        wait_for_every(&first, &subscriber).await;
        for server in [&one, &other] {
            wait_until_all_is_acked(&server.api).await;
        }
        assert_eq!(subscriber.arrivals().len(), first.len(), "nothing is delivered twice without a fault");
        Self {
            installations,
            servers: [Some(one), Some(other)],
            subscriber,
            first,
            under_way: HashSet::new(),
            most_repeated: None,
        }
    }

    /// Runs the rounds through a fault, during which the subscriber recovers.
    async fn survive(mut self, fault: impl AsyncFnOnce(&mut Self)) {
        let subscriber = self.subscriber.clone();
        subscriber.hang();
        let held = publish(&self.installations, "held").await;
        self.wait_until_matched().await;
        until("all requests are under way", async || (subscriber.open_requests() >= held.len()).then_some(())).await;
        let apis = self.apis();
        let across = tokio::spawn(async move { publish_through(&apis, "across").await });
        until("events are accepted", async || (!self.installations[0].execute(ACROSS).is_empty()).then_some(())).await;
        fault(&mut self).await;
        let across = across.await.unwrap();
        wait_for_every(&held, &subscriber).await;
        wait_for_every(&across, &subscriber).await;
        self.wait_until_ready().await;

        let settled = subscriber.arrivals().len();
        let last = publish(&self.installations, "last").await;
        wait_for_every(&last, &subscriber).await;
        self.wait_until_ready().await;
        for (place, server) in self.servers.iter_mut().enumerate() {
            let Some(server) = server.take() else { continue };
            assert!(server.terminate().await.success(), "{}", self.installations[place].log());
        }
        let counts = subscriber.counts();
        let twice = |ids: &HashSet<String>| ids.iter().filter(|id| counts[*id] > 1).cloned().collect::<Vec<_>>();
        println!("of {} events each, {} and {} were repeated", held.len(), twice(&held).len(), twice(&across).len());
        assert_eq!(twice(&self.first), [""; 0], "settled before the fault, and repeated");
        assert_eq!(twice(&last), [""; 0], "published after the fault, and repeated");
        let after = &subscriber.arrivals()[settled..];
        assert!(after.iter().all(|arrival| last.contains(&arrival.event_id)), "settled after the fault, and repeated");
        let repeated: Vec<String> =
            twice(&held).into_iter().filter(|id| !self.under_way.contains(id.as_str())).collect();
        assert_eq!(repeated, [""; 0], "not under way at the fault, and repeated");
        if let Some(most) = self.most_repeated {
            assert!((1..=most).contains(&twice(&held).len()), "{} of {most} are repeated", twice(&held).len());
        }
        let most = counts.values().max().expect("events arrived");
        assert!(*most <= 3, "an event was delivered {most} times");
    }

    /// Waits until all deliveries are on the topics of the outbox processor.
    async fn wait_until_matched(&self) {
        let installation = &self.installations[0];
        until("the channels have published everything", async || {
            installation.execute("SELECT 1 FROM outbox_event WHERE status <> 1 LIMIT 1").is_empty().then_some(())
        })
        .await;
        wait_until_acked(&installation.api(), |topic| topic.contains(".events.")).await;
    }

    /// The server that has the most deliveries in flight.
    async fn busiest(&mut self) -> usize {
        const IN_FLIGHT: &str = "posthaste_in_flight{relay=\"outbox-processor\"} ";
        let mut most = (0, 0);
        for (place, api) in self.apis().iter().enumerate() {
            let metrics = api.get("/metrics").await.unwrap().text;
            let in_flight = metrics.lines().find_map(|line| line.strip_prefix(IN_FLIGHT)).unwrap_or("0");
            most = most.max((in_flight.parse().expect("a number"), place));
        }
        assert!(most.0 > 0, "no server delivers");
        self.most_repeated = Some(most.0);
        most.1
    }

    /// Notes the events that may be repeated: those of which a request was sent until now.
    fn note_requests_under_way(&mut self) {
        self.under_way = self.subscriber.arrivals().into_iter().map(|arrival| arrival.event_id).collect();
    }

    fn apis(&self) -> [Api; 2] {
        self.installations.each_ref().map(Installation::api)
    }

    /// Waits until the running servers are ready, and all events and dead letters are done.
    async fn wait_until_ready(&self) {
        for server in self.servers.iter().flatten() {
            let mut last = String::new();
            let ready = async {
                loop {
                    if let Ok(readiness) = server.api.get("/readyz").await {
                        if readiness.json()["status"] == "ready" {
                            return;
                        }
                        last = readiness.text;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            let is_ready = timeout(Duration::from_secs(60), ready).await.is_ok();
            assert!(is_ready, "the server is not ready: {last}");
            wait_until_all_is_acked(&server.api).await;
            until("no dead letter is left", async || {
                for status in ["NEW", "FAILED"] {
                    let page = server.api.get(&format!("/api/dlt-messages?status={status}")).await.ok()?;
                    if page.status != 200 || page.json()["total"] != 0 {
                        return None;
                    }
                }
                Some(())
            })
            .await;
        }
    }
}

/// Shows what the servers logged if the test fails.
impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.installations.iter().for_each(|installation| println!("log of a server:\n{}", installation.log()));
        }
    }
}

async fn publish(installations: &[Installation; 2], round: &'static str) -> HashSet<String> {
    publish_through(&installations.each_ref().map(Installation::api), round).await
}

/// Publishes a round through both servers, and returns the ids when all events are accepted.
async fn publish_through(apis: &[Api; 2], round: &'static str) -> HashSet<String> {
    let [one, other] = apis;
    let (a, b) = tokio::join!(
        publish_by(one.clone(), other.clone(), format!("{round}-a")),
        publish_by(other.clone(), one.clone(), format!("{round}-b"))
    );
    a.into_iter().chain(b).collect()
}

/// Publishes through one server. While it does not accept a batch, sends the same batch to each server in turn, as a client
/// behind a load balancer would.
async fn publish_by(server: Api, other: Api, name: String) -> Vec<String> {
    let ids: Vec<String> = (0..EVENTS).map(|number| format!("{name}-{number}")).collect();
    for batch in ids.chunks(TYPES) {
        let event = |(place, id): (usize, &String)| json!({ "eventId": id, "eventType": event_type(place), "sourceService": "e2e", "payload": id });
        let body = json!(batch.iter().enumerate().map(event).collect::<Vec<_>>()).to_string();
        let end = Instant::now() + Duration::from_secs(60);
        let mut turn = 0;
        while !is_accepted(if turn % 2 == 0 { &server } else { &other }, body.clone()).await {
            assert!(Instant::now() < end, "no server accepts a batch");
            tokio::time::sleep(Duration::from_millis(20)).await;
            turn += 1;
        }
    }
    ids
}

async fn is_accepted(server: &Api, batch: String) -> bool {
    match timeout(CLIENT_TIMEOUT, server.post("/api/events/batch", batch)).await {
        Ok(Ok(answer)) if answer.status == 202 => {
            let results = answer.json();
            let results = results["results"].as_array().expect("a result for each event");
            results.iter().all(|result| result["eventId"].is_string())
        }
        _ => false,
    }
}

/// An installation whose database can be crashed.
async fn on_own_postgres(backend: Backend) -> (CrashableServer, Installation) {
    let postgres = Postgres::start().await;
    let mut installation = Installation::on(backend, &SETTINGS).await;
    installation.use_postgres(postgres.url().to_owned());
    (postgres, installation)
}

async fn a_killed_server(backend: Backend) {
    let scene = Scene::start(Installation::on(backend, &SETTINGS).await).await;
    scene
        .survive(async |scene| {
            let place = scene.busiest().await;
            scene.servers[place].take().expect("it runs").kill();
            scene.note_requests_under_way();
            scene.subscriber.recover();
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_one_of_two_servers_on_kafka_is_killed() {
    a_killed_server(Backend::Kafka).await;
}

/// The other server takes everything over while one is paused. The paused one then wakes up with leases that have ended.
async fn a_paused_server(backend: Backend) {
    let scene = Scene::start(Installation::on(backend, &SETTINGS).await).await;
    scene
        .survive(async |scene| {
            let place = scene.busiest().await;
            let paused = scene.servers[place].take().expect("it runs");
            paused.signal("STOP");
            scene.note_requests_under_way();
            scene.subscriber.recover();
            // The other server has done everything, also what the paused one had claimed: its leases have ended.
            scene.wait_until_ready().await;
            paused.signal("CONT");
            scene.servers[place] = Some(paused);
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_one_of_two_servers_is_paused_past_its_lease() {
    a_paused_server(Backend::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_one_of_two_servers_on_kafka_is_paused_past_its_lease() {
    a_paused_server(Backend::Kafka).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_the_database_of_two_servers_crashes() {
    let (mut postgres, installation) = on_own_postgres(Backend::Postgres).await;
    let scene = Scene::start(installation).await;
    scene
        .survive(async |scene| {
            scene.note_requests_under_way();
            postgres.restart().await;
            scene.subscriber.recover();
        })
        .await;
}

/// The subscriber responds while the database is away, so the outcomes wait to be settled.
#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_the_database_of_two_servers_is_shut_down_and_started() {
    let (mut postgres, installation) = on_own_postgres(Backend::Postgres).await;
    let scene = Scene::start(installation).await;
    scene
        .survive(async |scene| {
            scene.note_requests_under_way();
            postgres.shut_down().await;
            scene.subscriber.recover();
            postgres.start_again().await;
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_the_database_of_two_servers_on_kafka_crashes() {
    let (mut postgres, installation) = on_own_postgres(Backend::Kafka).await;
    let scene = Scene::start(installation).await;
    scene
        .survive(async |scene| {
            scene.note_requests_under_way();
            postgres.stop().await;
            scene.subscriber.recover();
            postgres.start_again().await;
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_event_is_lost_when_the_broker_of_two_servers_is_killed() {
    let mut kafka = Kafka::start().await;
    let mut installation = Installation::on(Backend::Postgres, &SETTINGS).await;
    installation.use_kafka(kafka.url(), "killed");
    installation.set("REGISTRY__URL", &apicurio().await.0);
    let scene = Scene::start(installation).await;
    scene
        .survive(async |scene| {
            kafka.stop().await;
            scene.subscriber.recover();
            kafka.start_again().await;
            // Acks are committed later. So what is delivered within a lease after the crash is repeated, too.
            scene.note_requests_under_way();
        })
        .await;
}

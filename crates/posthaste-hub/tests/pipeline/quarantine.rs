use std::path::Path;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use posthaste_api::{QuarantineAction, QuarantineSelection, QuarantineStatus};
use posthaste_core::bus::{Bus, Consumer, PublishError, Record, Topics};
use posthaste_core::hub_store::{
    HubDatabase, HubOptions, HubStores, Migrations, OpenError, QuarantineFilter, Registry,
};
use posthaste_core::{FaultKind, StoreError};
use posthaste_hub::Hub;
use posthaste_sql::sqlite;
use tokio::sync::Notify;

use crate::support::{ask, execute, open_database, open_on, test_settings};

const FILL: &str = "
    WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 25)
    INSERT INTO quarantined_record (id, group_name, topic, partition, \"offset\", key, headers, reason, replayable)
    SELECT printf('0190d0c0-1111-7abc-8def-%012d', n), 'g', 't', 3, 100 - n, 'key ' || n, '[[\"a\",\"b\"]]', 'r', true FROM n;
    INSERT INTO quarantined_value (record_id, value) SELECT id, x'0bad' FROM quarantined_record";

/// What a bus answers to each record.
type Answer = fn(&Record) -> Result<(), PublishError>;

/// A bus that answers as the test wants and stores nothing of the topic `t`.
struct TestBus {
    bus: Arc<dyn Bus>,
    answer: Mutex<Answer>,
    published: Mutex<Vec<Record>>,
    /// While it is `Some`, a publish waits for it.
    gate: Mutex<Option<Arc<Notify>>>,
    started: Notify,
}

#[async_trait]
impl Bus for TestBus {
    async fn publish(&self, records: Vec<Record>) -> Vec<Result<(), PublishError>> {
        if records.iter().all(|record| &*record.topic != "t") {
            return self.bus.publish(records).await;
        }
        let gate = self.gate.lock().unwrap().clone();
        self.started.notify_one();
        if let Some(gate) = gate {
            gate.notified().await;
        }
        let answer = *self.answer.lock().unwrap();
        let answers = records.iter().map(answer).collect();
        self.published.lock().unwrap().extend(records);
        answers
    }

    async fn subscribe(&self, group: &str, topics: Topics) -> Result<Box<dyn Consumer>, StoreError> {
        self.bus.subscribe(group, topics).await
    }
}

/// A database whose hub gets a [`TestBus`].
struct WithTestBus {
    database: Arc<sqlite::HubDatabase>,
    bus: Mutex<Option<Arc<TestBus>>>,
}

#[async_trait]
impl HubDatabase for WithTestBus {
    fn migrations(&self) -> &dyn Migrations {
        self.database.migrations()
    }

    async fn migrate(&self) -> Result<(), OpenError> {
        self.database.migrate().await
    }

    async fn open(&self, options: HubOptions) -> Result<HubStores, OpenError> {
        let mut stores = self.database.open(options).await?;
        let bus = Arc::new(TestBus {
            bus: stores.bus,
            answer: Mutex::new(|_| Ok(())),
            published: Mutex::default(),
            gate: Mutex::default(),
            started: Notify::new(),
        });
        *self.bus.lock().unwrap() = Some(bus.clone());
        stores.bus = bus;
        Ok(stores)
    }

    fn registry(&self) -> Arc<dyn Registry> {
        self.database.registry()
    }

    async fn check_write(&self, bytes: usize) -> Result<(), StoreError> {
        self.database.check_write(bytes).await
    }

    async fn close(&self) {
        self.database.close().await;
    }
}

/// A hub with 25 records in quarantine.
async fn start(folder: &Path) -> (Arc<Hub>, Arc<TestBus>) {
    let database = Arc::new(WithTestBus { database: open_database(folder).await, bus: Mutex::default() });
    let hub = open_on(folder, database.clone(), test_settings()).await;
    execute(folder, FILL).await;
    let bus = database.bus.lock().unwrap().clone().unwrap();
    (hub, bus)
}

fn all() -> QuarantineAction {
    let filter =
        QuarantineFilter { status: Some(posthaste_hub::QuarantineStatus::Quarantined), ..QuarantineFilter::default() };
    QuarantineAction { selection: QuarantineSelection::Matching { filter, after: None }, reason: "test".to_owned() }
}

const COUNT: &str = "SELECT count(*) FROM quarantined_record WHERE status = 0 AND claim_id IS NULL";

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_publishes_the_same_records_in_their_order_to_their_partition() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, bus) = start(folder.path()).await;
    let replayed = hub.replay_quarantined(&all()).await.unwrap();
    assert_eq!(replayed.results.len(), 25);
    assert!(replayed.results.iter().all(|result| result.status == Some(QuarantineStatus::Replayed)), "{replayed:?}");
    let published = bus.published.lock().unwrap().clone();
    let keys: Vec<&str> = published.iter().map(|record| record.key.as_str()).collect();
    let expected: Vec<String> = (1..=25).rev().map(|number| format!("key {number}")).collect();
    assert_eq!(keys, expected, "in the order of their offsets");
    let same = |record: &Record| {
        (record.route, &record.value[..]) == (3, b"\x0b\xad") && record.headers == [("a".to_owned(), "b".to_owned())]
    };
    assert!(published.iter().all(same), "{published:?}");
    assert!(hub.replay_quarantined(&all()).await.unwrap().results.is_empty());
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_record_stays_in_quarantine_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, bus) = start(folder.path()).await;
    *bus.answer.lock().unwrap() = |record| match record.key.as_str() {
        "key 7" => Err(PublishError::Refused { reason: "it is too large".to_owned() }),
        _ => Ok(()),
    };
    let replayed = hub.replay_quarantined(&all()).await.unwrap();
    let failed: Vec<_> = replayed.results.iter().filter(|result| result.detail.is_some()).collect();
    assert!(failed.len() == 1 && failed[0].status == Some(QuarantineStatus::Quarantined), "{failed:?}");
    assert!(failed[0].detail.as_ref().unwrap().contains("it is too large"), "{failed:?}");
    let shown = hub.quarantined(failed[0].id).await.unwrap().unwrap();
    assert_eq!(shown.record.status_reason, failed[0].detail);
    assert_eq!(ask::<i64>(folder.path(), COUNT).await, 1);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bus_that_is_away_ends_the_replay_and_changes_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, bus) = start(folder.path()).await;
    *bus.answer.lock().unwrap() = |_| {
        let error = StoreError::new("publish", FaultKind::Transient, "no broker");
        Err(PublishError::Unavailable(Arc::new(error)))
    };
    let replayed = hub.replay_quarantined(&all()).await.unwrap();
    let why: Vec<&str> = replayed.results.iter().filter_map(|result| result.detail.as_deref()).collect();
    assert_eq!(why.len(), 25, "{replayed:?}");
    assert_eq!(why.iter().filter(|why| why.contains("no broker")).count(), 20);
    assert_eq!(why.iter().filter(|why| why.contains("was not tried")).count(), 5);
    assert_eq!(ask::<i64>(folder.path(), COUNT).await, 25, "none is claimed any longer");
    *bus.answer.lock().unwrap() = |_| Ok(());
    let replayed = hub.replay_quarantined(&all()).await.unwrap();
    assert!(replayed.results.iter().all(|result| result.detail.is_none()), "{replayed:?}");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replays_at_once_publish_no_record_twice_and_a_caller_who_hangs_up_ends_none() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, bus) = start(folder.path()).await;
    let gate = Arc::new(Notify::new());
    *bus.gate.lock().unwrap() = Some(gate.clone());
    let first = tokio::spawn({
        let hub = hub.clone();
        async move { hub.replay_quarantined(&all()).await }
    });
    bus.started.notified().await;
    *bus.gate.lock().unwrap() = None;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let second = hub.replay_quarantined(&all()).await.unwrap();
    let busy = second.results.iter().filter_map(|result| result.detail.as_deref());
    assert!(busy.clone().count() == 20 && busy.clone().all(|why| why.contains("by another request")), "{second:?}");
    let discarded = hub.discard_quarantined(&all()).await.unwrap();
    assert!(discarded.results.iter().all(|result| result.detail.is_some()), "{discarded:?}");
    gate.notify_one();
    crate::support::until("the first replay has ended", async || {
        (ask::<i64>(folder.path(), "SELECT count(*) FROM quarantined_record WHERE status = 1").await == 25)
            .then_some(())
    })
    .await;
    assert_eq!(bus.published.lock().unwrap().len(), 25);
    hub.stop().await;
}

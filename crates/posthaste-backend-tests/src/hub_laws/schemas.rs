//! The laws of [`SchemaStore`]. [`schema_laws!`](crate::schema_laws!) makes a test of every one.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use posthaste_core::hub_store::{Applied, SchemaChange, SchemaReference, SchemaStore, SchemaText, Subject};

use super::{HubHarness, options};

/// One database on which the tables of the registry are opened.
#[async_trait]
pub trait SchemaHarness: Send + Sync {
    /// Opens the tables as one more process.
    async fn open_schemas(&self) -> Arc<dyn SchemaStore>;
}

#[async_trait]
impl<H: HubHarness> SchemaHarness for H {
    async fn open_schemas(&self) -> Arc<dyn SchemaStore> {
        self.open(options()).await.schemas
    }
}

/// Expands to one test for each law of the tables of the Schema Registry. The argument makes a harness.
#[macro_export]
macro_rules! schema_laws {
    ($start:expr) => {
        $crate::schema_laws!(
            $start =>
            a_schema_has_one_id_in_all_subjects
            versions_are_numbered_from_one_and_never_reused
            a_change_to_an_old_revision_is_refused
            processes_that_register_at_once_agree
            a_deleted_version_exists_until_it_is_purged
            levels_are_kept_for_each_subject
            references_are_found_by_the_version_they_refer_to
        );
    };
    ($start:expr => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::hub_laws::schemas::$law(&$start).await;
            }
        )*
    };
}

fn register(subject: &str, text: &str) -> SchemaChange {
    refer(subject, text, Vec::new())
}

fn refer(subject: &str, text: &str, references: Vec<SchemaReference>) -> SchemaChange {
    let digest = Bytes::copy_from_slice(text.as_bytes());
    let schema = SchemaText { text: text.to_owned(), references };
    SchemaChange::Register { subject: subject.to_owned(), schema, digest }
}

/// Applies a change to the current revision.
async fn apply(store: &Arc<dyn SchemaStore>, change: SchemaChange) -> Applied {
    store.apply(change, store.revision().await.unwrap()).await.unwrap()
}

/// The id and the version of a schema that is registered now.
async fn registered(store: &Arc<dyn SchemaStore>, subject: &str, text: &str) -> (i32, i32) {
    match apply(store, register(subject, text)).await {
        Applied::Registered { id, version } => (id, version),
        other => panic!("{other:?}"),
    }
}

fn delete(subject: &str, version: Option<i32>) -> SchemaChange {
    SchemaChange::Delete { subject: subject.to_owned(), version }
}

fn purge(subject: &str, version: Option<i32>) -> SchemaChange {
    SchemaChange::Purge { subject: subject.to_owned(), version }
}

/// The numbers of all versions of a subject, and if each is deleted.
async fn versions(store: &Arc<dyn SchemaStore>, subject: &str) -> Vec<(i32, bool)> {
    let versions = store.versions(subject).await.unwrap();
    versions.iter().map(|version| (version.version, version.is_deleted)).collect()
}

/// The id of a schema is in every record, so it must mean the same for ever.
pub async fn a_schema_has_one_id_in_all_subjects(harness: &impl SchemaHarness) {
    let store = harness.open_schemas().await;
    let (first, _) = registered(&store, "a", "one").await;
    assert!(first > 0);
    assert_eq!(registered(&store, "b", "one").await, (first, 1));
    let (second, _) = registered(&store, "a", "two").await;
    assert_ne!(second, first);
    assert_eq!(store.schema(first).await.unwrap().unwrap().text, "one");
    assert!(store.schema(second + 1_000).await.unwrap().is_none());
    let of_first = store.versions_of_schema(first).await.unwrap();
    let of_first: Vec<(&str, i32)> = of_first.iter().map(|found| (&*found.subject, found.version)).collect();
    assert_eq!(of_first, [("a", 1), ("b", 1)]);
    assert_eq!(store.versions("a").await.unwrap()[1].digest, "two");
    // An id stays, even if nothing has it any more.
    apply(&store, delete("a", None)).await;
    apply(&store, purge("a", None)).await;
    assert_eq!(store.schema(second).await.unwrap().unwrap().text, "two");
    assert_eq!(registered(&store, "c", "two").await, (second, 1));
    assert!(registered(&store, "c", "three").await.0 > second);
}

/// The number of a deleted version is not given to another schema.
pub async fn versions_are_numbered_from_one_and_never_reused(harness: &impl SchemaHarness) {
    let store = harness.open_schemas().await;
    for (number, text) in ["one", "two", "three"].into_iter().enumerate() {
        assert_eq!(registered(&store, "a", text).await.1, number as i32 + 1);
    }
    apply(&store, delete("a", Some(3))).await;
    assert_eq!(registered(&store, "a", "three").await.1, 4);
    assert_eq!(versions(&store, "a").await, [(1, false), (2, false), (3, true), (4, false)]);
    assert_eq!(versions(&store, "unknown").await, []);
}

/// A decision that was made before another change must be made again.
pub async fn a_change_to_an_old_revision_is_refused(harness: &impl SchemaHarness) {
    let (store, other) = (harness.open_schemas().await, harness.open_schemas().await);
    let old = store.revision().await.unwrap();
    registered(&other, "a", "one").await;
    assert!(store.revision().await.unwrap() > old);
    let level = SchemaChange::SetLevel { subject: None, level: Some("NONE".to_owned()) };
    for change in [register("a", "two"), delete("a", None), purge("a", None), level] {
        assert_eq!(store.apply(change, old).await.unwrap(), Applied::Stale);
    }
    assert_eq!(versions(&store, "a").await, [(1, false)]);
    assert_eq!(store.level(None).await.unwrap(), None);
}

/// Each process looks first if the subject has the schema, as the service does.
pub async fn processes_that_register_at_once_agree(harness: &impl SchemaHarness) {
    let mut processes = Vec::new();
    for _ in 0..8 {
        processes.push(harness.open_schemas().await);
    }
    let register_once = |store: Arc<dyn SchemaStore>| async move {
        loop {
            let revision = store.revision().await.unwrap();
            if let Some(found) = store.versions("a").await.unwrap().first() {
                return (found.schema_id, found.version);
            }
            if let Applied::Registered { id, version } = store.apply(register("a", "one"), revision).await.unwrap() {
                return (id, version);
            }
        }
    };
    let tasks: Vec<_> = processes.iter().map(|store| tokio::spawn(register_once(store.clone()))).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    assert_eq!(versions(&processes[0], "a").await, [(1, false)]);
    assert_eq!(processes[0].revision().await.unwrap(), 1, "one process registered it");
}

/// A version that is not deleted is not purged.
pub async fn a_deleted_version_exists_until_it_is_purged(harness: &impl SchemaHarness) {
    let store = harness.open_schemas().await;
    registered(&store, "a", "one").await;
    registered(&store, "a", "two").await;
    registered(&store, "b", "one").await;
    apply(&store, delete("a", Some(1))).await;
    assert_eq!(versions(&store, "a").await, [(1, true), (2, false)]);
    apply(&store, purge("a", None)).await;
    assert_eq!(versions(&store, "a").await, [(2, false)]);
    apply(&store, delete("a", None)).await;
    let subject = |name: &str, is_deleted| Subject { name: name.to_owned(), is_deleted };
    assert_eq!(store.subjects().await.unwrap(), [subject("a", true), subject("b", false)]);
    apply(&store, purge("a", Some(2))).await;
    assert_eq!(store.subjects().await.unwrap(), [subject("b", false)]);
}

/// The global level is a level like any other.
pub async fn levels_are_kept_for_each_subject(harness: &impl SchemaHarness) {
    let store = harness.open_schemas().await;
    assert_eq!(store.level(None).await.unwrap(), None);
    let set = |subject: Option<&str>, level: Option<&str>| SchemaChange::SetLevel {
        subject: subject.map(str::to_owned),
        level: level.map(str::to_owned),
    };
    apply(&store, set(None, Some("NONE"))).await;
    apply(&store, set(Some("a"), Some("FULL"))).await;
    apply(&store, set(Some("a"), Some("FORWARD"))).await;
    let level = async |subject| store.level(subject).await.unwrap();
    assert_eq!(level(None).await.as_deref(), Some("NONE"));
    assert_eq!(level(Some("a")).await.as_deref(), Some("FORWARD"));
    assert_eq!(level(Some("b")).await, None);
    apply(&store, set(Some("a"), None)).await;
    assert_eq!(level(Some("a")).await, None);
}

/// A version that others import must not be deleted before them.
pub async fn references_are_found_by_the_version_they_refer_to(harness: &impl SchemaHarness) {
    let store = harness.open_schemas().await;
    registered(&store, "money", "one").await;
    let reference =
        |name: &str, version| SchemaReference { name: name.to_owned(), subject: "money".to_owned(), version };
    let references = vec![reference("z.proto", 1), reference("a.proto", 7)];
    let Applied::Registered { id, .. } = apply(&store, refer("order", "order", references.clone())).await else {
        panic!("it is registered");
    };
    assert_eq!(store.schema(id).await.unwrap().unwrap().references, references, "in their order");
    assert_eq!(store.referring_schemas("money", 1).await.unwrap(), [id]);
    assert!(store.referring_schemas("money", 2).await.unwrap().is_empty());
    apply(&store, delete("order", None)).await;
    assert!(store.referring_schemas("money", 1).await.unwrap().is_empty(), "nothing in use refers to it");
}

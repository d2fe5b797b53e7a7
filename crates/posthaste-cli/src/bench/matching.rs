use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::{StreamExt, TryStreamExt};
use posthaste_api::proto::EventHubEvent;
use posthaste_api::proto::event_hub_event::Event;
use posthaste_api::{ANY, Filter};
use posthaste_core::hub_store::{
    Definition, DefinitionFields, EventKey, HubDatabase as _, Subscription, SubscriptionFields,
};
use posthaste_hub::SubscriptionIndex;
use posthaste_sql::sqlite::HubDatabase;

use super::Figure;

/// The sizes of the curve.
const SIZES: [usize; 6] = [1, 10, 100, 1_000, 10_000, 100_000];
/// How many different events are matched, and how many of them are timed together.
const EVENTS: usize = 20_000;
const ROUND: usize = 500;
const MEASURED: Duration = Duration::from_millis(500);
/// The target for an event that matches one subscription by its key, in nanoseconds.
const TARGET: f64 = 1_000.0;
/// How many subscriptions are created at once.
const CREATED: usize = 200;

/// What the subscriptions have in common.
#[derive(Clone, Copy)]
enum Case {
    Distinct,
    Wildcards,
    Filters,
}

/// The cost of matching one event, and how long it takes to load the subscriptions after a change.
pub async fn run(quick: bool) -> anyhow::Result<Vec<Figure>> {
    let sizes = || SIZES.into_iter().take(if quick { 5 } else { 6 });
    let mut figures = Vec::new();
    for case in [Case::Distinct, Case::Wildcards, Case::Filters] {
        for count in sizes() {
            let started = Instant::now();
            let index = SubscriptionIndex::new((0..count).map(|number| case.subscription(number)).collect());
            let built = started.elapsed();
            let nanos = per_match(&index, case, count)?;
            let figure = Figure::new("matching", format!("{count} subscriptions, {}", case.name()), nanos, "ns/event");
            figures.push(if matches!(case, Case::Distinct) { figure.at_most(TARGET) } else { figure });
            if sizes().next_back() == Some(count) {
                let what = format!("index of {count} subscriptions, {}", case.name());
                figures.push(Figure::new("matching", what, built.as_secs_f64() * 1_000.0, "ms"));
            }
        }
    }
    figures.push(load(sizes().next_back().unwrap_or_default()).await?);
    Ok(figures)
}

/// The time to match one event, in nanoseconds.
fn per_match(index: &SubscriptionIndex, case: Case, count: usize) -> anyhow::Result<f64> {
    // Far apart, so that the processor's cache does not help more than it would in practice.
    let events: Vec<_> = (0..EVENTS).map(|number| case.event(number * 7_919 % count)).collect();
    for event in &events {
        anyhow::ensure!(!index.matching(event).is_empty(), "an event matches no subscription");
    }
    let (started, mut rounds) = (Instant::now(), Vec::new());
    while started.elapsed() < MEASURED {
        for events in events.chunks(ROUND) {
            let round = Instant::now();
            events.iter().for_each(|event| drop(black_box(index.matching(black_box(event)))));
            rounds.push(round.elapsed().as_nanos() as f64 / events.len() as f64);
        }
    }
    // The median, because other processes interrupt some rounds.
    rounds.sort_by(f64::total_cmp);
    Ok(rounds[rounds.len() / 2])
}

/// The time to read all subscriptions from SQLite and to index them, which a change of one subscription causes.
async fn load(count: usize) -> anyhow::Result<Figure> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite://{}", folder.path().join("matching.db").display());
    let database = HubDatabase::open(&url).await?;
    database.migrate().await?;
    let registry = database.registry();
    let (definition, _) = Case::Filters.subscription(0);
    let definition = registry.create_definition(definition.fields).await?;
    let create = |number: usize| {
        let (_, subscription) = Case::Filters.subscription(number);
        let (registry, definition_id) = (registry.clone(), definition.id.clone());
        let fields = SubscriptionFields { definition_id, ..subscription.fields };
        async move { registry.create_subscription(&subscription.id, fields).await }
    };
    let created = futures_util::stream::iter((0..count).map(create)).buffer_unordered(CREATED);
    created.try_for_each(|_| async { Ok(()) }).await.context("failed to create subscriptions")?;
    let started = Instant::now();
    let (_, active) = registry.load_active().await?;
    let index = SubscriptionIndex::new(active);
    let took = started.elapsed();
    anyhow::ensure!(index.matching(&Case::Filters.event(0)).len() == 1, "a subscription was not loaded");
    database.close().await;
    let what = format!("load and index {count} subscriptions of SQLite");
    Ok(Figure::new("matching", what, took.as_secs_f64() * 1_000.0, "ms"))
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Distinct => "a key each",
            Self::Wildcards => "16 combinations of wildcards",
            Self::Filters => "one key, an eq filter each",
        }
    }

    /// The parts of the key that the subscription of this number has.
    fn key(self, number: usize) -> [String; 4] {
        let part = |name: &str, number: usize| format!("{name}-{number}");
        match self {
            Self::Distinct => ["service", "type", "resource", "operation"].map(|name| part(name, number)),
            Self::Wildcards => {
                let group = number / 16;
                let part = |name, bit: usize| if number & bit == 0 { part(name, group) } else { ANY.to_owned() };
                [part("service", 1), part("type", 0), part("resource", 2), part("operation", 4)]
            }
            Self::Filters => ["service", "type", "resource", "operation"].map(str::to_owned),
        }
    }

    fn subscription(self, number: usize) -> (Definition, Subscription) {
        let (id, (created_at, updated_at)) = (format!("{number:036}"), Default::default());
        let [source_service, event_type, resource_type, operation_type] = self.key(number);
        let key = EventKey { source_service, event_type, resource_type, operation_type };
        let fields = DefinitionFields { key, description: None };
        let definition = Definition { id: id.clone(), fields, created_at, updated_at, version: 1 };
        let filter = format!(r#"[{{"path":"/customer/id","op":"eq","value":"customer-{number}"}}]"#);
        let fields = SubscriptionFields {
            subscriber_id: id.clone(),
            definition_id: id.clone(),
            endpoint: "https://example.com/hook".to_owned(),
            endpoint_digest: Default::default(),
            payload_type: "PAYLOAD_TYPE_JSON".to_owned(),
            auth_type: "NONE".to_owned(),
            credentials_sealed: Default::default(),
            header_names: Vec::new(),
            timeout: None,
            max_retry: None,
            tenant_id: (matches!(self, Self::Wildcards) && number & 8 == 0).then(|| "acme".to_owned()),
            filter: match self {
                Self::Filters => serde_json::from_str(&filter).unwrap_or_default(),
                Self::Distinct | Self::Wildcards => Filter::default(),
            },
            active: true,
        };
        (definition, Subscription { id, fields, created_at, updated_at, version: 1 })
    }

    /// An event that the subscription of this number matches.
    fn event(self, number: usize) -> EventHubEvent {
        let number = if matches!(self, Self::Wildcards) { number / 16 * 16 } else { number };
        let [source_service, event_type, resource_type, operation_type] = self.key(number);
        let payload =
            format!(r#"{{"order":"{number}","customer":{{"id":"customer-{number}","name":"Ada"}},"total":12.50}}"#);
        EventHubEvent {
            source_service,
            event_type,
            resource_type: Some(resource_type),
            operation_type: Some(operation_type),
            tenant_id: Some("acme".to_owned()),
            event: Some(Event::JsonText(payload)),
            ..EventHubEvent::default()
        }
    }
}

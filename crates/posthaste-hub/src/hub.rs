use std::collections::{HashMap, HashSet};
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use posthaste_api::{Domain, MAX_TIMEOUT};
use posthaste_core::bus::{Bus, Fetched, Quarantine, Topics};
use posthaste_core::hub_store::{BusInspector, DeadLetterSource, HubDatabase, HubOptions, HubStores, OpenError};
use posthaste_core::{
    BusItem, BusSource, BusSourceOptions, Decode, DecodeError, Decoded, Load, OnStop, RelayOptions, RetryPolicy, Sink,
    StoreError, Wakeup,
};
use posthaste_schema::{BuiltinRegistry, Framer, SchemaError, SchemaRegistry};
use posthaste_webhook::Client;

use crate::attempt_log::Described;
use crate::channels::Channels;
use crate::dlt_intake::Intake;
use crate::envelope;
use crate::event_processor::FanOut;
use crate::framed_bus::FramedBus;
use crate::ingest::Ingest;
use crate::lanes::{Budgets, Lanes};
use crate::matching::SubscriptionMatcher;
use crate::readiness::ReadinessCheck;
use crate::registrations::Registrations;
use crate::relays::{MakeSource, Relays};
use crate::retention;
use crate::roles::{Role, Roles};
use crate::secrets::Sealer;
use crate::settings::Settings;
use crate::sources::{SourcePart, Sources};
use crate::topics::TopicNames;
use crate::watchdog;
use crate::webhook_dispatcher::{DeadLetterDeliveries, FreshDeliveries, WebhookDispatcher};

/// A delivery whose retry is due later than this is deferred as a dead letter, instead of waiting in memory.
const DEFER_AFTER: Duration = Duration::from_secs(2);
/// The maximum number and size of the records that wait in memory for a retry, per group.
const MAX_WAITING: Load = Load { items: 10_000, bytes: 64 * 1024 * 1024 };
/// What the lanes of all subscriptions may hold in memory together, each only its share.
const LANES: Budgets = Budgets {
    fresh: Load { items: 64_000, bytes: 512 * 1024 * 1024 },
    dead_letters: Load { items: 2_000, bytes: 256 * 1024 * 1024 },
};
/// In addition, for deliveries that a lane has refused, until they are dead letters. They may also use what the lanes
/// leave.
const MAX_REFUSED: Load = Load { items: 2_000, bytes: 64 * 1024 * 1024 };
/// How many dead letters one write settles. Other writes wait meanwhile.
const SETTLED_AT_ONCE: usize = 50;
/// The names of the relays that read the event topics, in logs, metrics and readiness.
pub(crate) const EVENT_PROCESSOR: &str = "event-processor";
pub(crate) const OUTBOX_PROCESSOR: &str = "outbox-processor";
pub(crate) const DLT_INTAKE: &str = "dlt-intake";
pub(crate) const DLT_RETRY: &str = "dlt-retry";
/// A consumer that is not used for longer than its lease leaves its group, so an idle one is used at least this often.
const LONGEST_BUS_POLL: Duration = Duration::from_secs(3);
/// How long a stop waits for requests in flight: the longest timeout of a subscription, and a margin. Without requests
/// in flight, a stop does not wait.
pub(crate) const LONGEST_REQUEST: Duration = MAX_TIMEOUT.saturating_add(Duration::from_secs(2));

/// All services of one process, running.
pub struct Hub {
    pub(crate) database: Arc<dyn HubDatabase>,
    pub(crate) stores: HubStores,
    pub(crate) dead_letters: DeadLetterSource,
    pub(crate) topics: TopicNames,
    /// The relays that had a lag at the last measurement.
    pub(crate) lagging: Mutex<HashSet<String>>,
    ingest: Ingest,
    registrations: Registrations,
    builtin_registry: Arc<BuiltinRegistry>,
    pub(crate) relays: Relays,
    pub(crate) readiness: ReadinessCheck,
    pub(crate) channels: Channels,
    pub(crate) sources: Sources,
    pub(crate) roles: Roles,
}

/// The parts of a hub.
pub struct Parts {
    pub database: Arc<dyn HubDatabase>,
    /// A bus outside of the database; `None` for the one that is built into it.
    pub bus: Option<ExternalBus>,
    /// A Schema Registry elsewhere; `None` for the one that is built in.
    pub registry: Option<Arc<dyn SchemaRegistry>>,
    /// The buses of channels that do not use the one of the hub, by event type.
    pub channel_buses: HashMap<String, ChannelBus>,
    /// The outbox tables in the databases of services.
    pub sources: Vec<SourcePart>,
    pub client: Client,
    pub sealer: Sealer,
    pub settings: Settings,
    /// What this process does.
    pub roles: Roles,
}

/// Where the events of one channel are published, if that differs from the other channels.
pub struct ChannelBus {
    /// `None` for the bus of the hub.
    pub bus: Option<Arc<dyn Bus>>,
    /// `None` for the registry of the hub.
    pub registry: Option<Arc<dyn SchemaRegistry>>,
}

/// A bus outside of the database, such as Kafka.
pub struct ExternalBus {
    pub bus: Arc<dyn Bus>,
    pub inspector: Arc<dyn BusInspector>,
}

/// Why a hub does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("the database does not answer")]
    Store(#[from] StoreError),
    #[error("the schema of the messages cannot be used")]
    Schema(#[from] SchemaError),
}

impl Hub {
    pub async fn start(parts: Parts) -> Result<Arc<Self>, StartError> {
        let Parts { database, bus, registry, channel_buses, sources, client, sealer, settings, roles } = parts;
        database.migrate().await?;
        let (lease, max_channels) = (settings.outbox.lease, settings.bus.max_channels);
        let (partitions, is_ordered) = (settings.bus.partitions, settings.outbox.ordered);
        let options = HubOptions { lease, max_channels, partitions, is_ordered };
        let mut stores = database.open(options).await?;
        let has_external_bus = bus.is_some();
        if let Some(ExternalBus { bus, inspector }) = bus {
            (stores.bus, stores.inspector) = (bus, inspector);
        }
        let builtin_registry = Arc::new(BuiltinRegistry::new(stores.schemas.clone()));
        let framer =
            Arc::new(Framer::new(registry.clone().unwrap_or_else(|| builtin_registry.clone()), envelope::schema())?);
        let topics = settings.topic_names();
        let levels = settings.compatibility_of_topics(&topics);
        let frame = |bus: Arc<dyn Bus>, framer: Arc<Framer>| {
            Arc::new(FramedBus::new(bus, framer, topics.clone(), levels.clone())) as Arc<dyn Bus>
        };
        let framed = frame(stores.bus.clone(), framer.clone());
        let mut own_buses = HashMap::new();
        for (event_type, own) in channel_buses {
            let framer = match own.registry {
                Some(registry) => Arc::new(Framer::new(registry, envelope::schema())?),
                None => framer.clone(),
            };
            own_buses.insert(event_type, frame(own.bus.unwrap_or_else(|| stores.bus.clone()), framer));
        }
        if roles.has(Role::Dlt) {
            stores.dead_letters.end_schedules(settings.dlt.max_retry).await?;
        }
        let wakeup = Wakeup::default();
        let lanes = Lanes::new(settings.delivery.concurrency, LANES, wakeup.clone());
        let room = Arc::new(lanes.clone());
        let dead_letters = DeadLetterSource::with_room(stores.dead_letters.clone(), lease, room, wakeup);

        let relays = Relays::default();
        let channels = Channels::new(&stores, framed.clone(), own_buses, topics.clone(), relays.clone(), &settings);
        let sources = Sources::new(sources);
        if roles.has(Role::Channels) {
            channels.start().await?;
            sources.start(&channels);
        }

        retention::start(&stores, &settings, relays.supervisor());

        let egress = client.egress().clone();
        let pipeline = Pipeline {
            bus: framed,
            framer,
            quarantine: stores.quarantine.clone(),
            topics,
            dispatcher: WebhookDispatcher::new(client, sealer.clone(), lanes, relays.stopping().clone()),
            relays: relays.clone(),
            settings,
        };
        if roles.has(Role::Processor) {
            pipeline.start_event_processor(SubscriptionMatcher::new(stores.registry.clone())).await?;
        }
        if roles.has(Role::Delivery) {
            pipeline.start_outbox_processor().await?;
        }
        if roles.has(Role::Dlt) {
            pipeline.start_dlt_intake(&dead_letters).await?;
            pipeline.start_dlt_retry(&dead_letters);
        }

        let hub = Arc::new(Self {
            ingest: Ingest::start(channels.clone().into_store(), relays.supervisor()),
            channels,
            sources,
            readiness: ReadinessCheck::new(&pipeline.settings, has_external_bus, registry),
            builtin_registry,
            registrations: Registrations::new(stores.registry.clone(), sealer, egress),
            topics: pipeline.topics,
            lagging: Mutex::default(),
            database,
            stores,
            dead_letters,
            relays,
            roles,
        });
        watchdog::start(&hub);
        Ok(hub)
    }

    /// What this process does.
    pub fn roles(&self) -> &Roles {
        &self.roles
    }

    /// Accepts events.
    pub fn ingest(&self) -> &Ingest {
        &self.ingest
    }

    /// Definitions and subscriptions.
    pub fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    /// The built-in Schema Registry. Other programs may use it even if this hub uses another one.
    pub fn builtin_registry(&self) -> &Arc<BuiltinRegistry> {
        &self.builtin_registry
    }

    /// Starts no new deliveries, waits for those in flight, releases all other claims, and closes the database.
    pub async fn stop(&self) {
        self.relays.supervisor().stop().await;
        self.sources.close().await;
        self.database.close().await;
    }
}

/// Decodes the messages of this name. Waits only for a schema that was not looked up yet.
fn decode_with<T: Send + 'static>(
    framer: &Arc<Framer>,
    message_name: &'static str,
    decode: fn(Bytes) -> Result<Decoded<T>, DecodeError>,
) -> Decode<T> {
    let framer = framer.clone();
    Box::new(move |record: &Fetched| match framer.decode_now(&record.value, message_name) {
        Some(message) => Box::pin(ready(message.and_then(decode))),
        None => {
            let framer = framer.clone();
            Box::pin(async move { framer.decode(&record.value, message_name).await.and_then(decode) })
        }
    })
}

/// The four relays after the event topics.
struct Pipeline {
    bus: Arc<dyn Bus>,
    framer: Arc<Framer>,
    quarantine: Arc<dyn Quarantine>,
    topics: TopicNames,
    dispatcher: WebhookDispatcher,
    relays: Relays,
    settings: Settings,
}

impl Pipeline {
    /// Starts the relay of a group that reads these topics. `reading` is called at each start of the relay.
    async fn start_group<T, K>(
        &self,
        group: &'static str,
        topics: Topics,
        reading: impl Fn() -> BusSourceOptions<T> + Send + Sync + 'static,
        sink: K,
        options: RelayOptions,
    ) -> Result<(), StoreError>
    where
        T: Send + Sync + 'static,
        BusItem<T>: Described,
        K: Sink<Item = BusItem<T>>,
    {
        let (bus, quarantine) = (self.bus.clone(), self.quarantine.clone());
        let make: MakeSource<BusSource<T>> = Box::new(move || {
            let (bus, quarantine, topics, reading) = (bus.clone(), quarantine.clone(), topics.clone(), reading());
            Box::pin(async move {
                let consumer = bus.subscribe(group, topics).await?;
                Ok(BusSource::new(group, bus, consumer, quarantine, reading))
            })
        });
        let first = make().await?;
        let poll_interval = options.poll_interval.min(LONGEST_BUS_POLL);
        self.relays.start(group, first, make, sink, RelayOptions { poll_interval, ..options });
        Ok(())
    }

    async fn start_event_processor(&self, matcher: SubscriptionMatcher) -> Result<(), StoreError> {
        let framer = self.framer.clone();
        let reading = move || BusSourceOptions {
            decode: decode_with(&framer, envelope::EVENT, envelope::decode_event),
            dead_letter: None,
            defer_after: Duration::MAX,
            max_waiting: MAX_WAITING,
        };
        let sink = FanOut::new(self.bus.clone(), matcher, &self.settings);
        let options = self.pipeline_options(RetryPolicy::forever());
        self.start_group(EVENT_PROCESSOR, self.topics.all_events(), reading, sink, options).await
    }

    async fn start_outbox_processor(&self) -> Result<(), StoreError> {
        let (topics, framer) = (self.topics.clone(), self.framer.clone());
        let reading = move || {
            let topics = topics.clone();
            BusSourceOptions {
                decode: decode_with(&framer, envelope::DELIVERY, envelope::decode_delivery),
                dead_letter: Some(Box::new(move |item, given_up| {
                    Box::pin(ready(Ok(envelope::dead_letter(&topics, item, given_up))))
                })),
                defer_after: DEFER_AFTER,
                max_waiting: MAX_WAITING,
            }
        };
        let outboxes = Domain::ALL.map(|domain| self.topics.outbox(domain).to_string());
        let retry = RetryPolicy::Exponential {
            base: Duration::from_millis(100),
            max: Duration::from_secs(1),
            max_attempts: Some(self.settings.delivery.max_retry + 1),
        };
        let options = RelayOptions {
            max_in_flight: LANES.fresh.items + MAX_REFUSED.items,
            max_bytes: LANES.fresh.bytes + MAX_REFUSED.bytes,
            drain: LONGEST_REQUEST,
            ..self.pipeline_options(retry)
        };
        let sink = FreshDeliveries(self.dispatcher.clone());
        self.start_group(OUTBOX_PROCESSOR, Topics::Named(outboxes.into()), reading, sink, options).await
    }

    async fn start_dlt_intake(&self, dead_letters: &DeadLetterSource) -> Result<(), StoreError> {
        let framer = self.framer.clone();
        let reading = move || BusSourceOptions {
            decode: decode_with(&framer, envelope::DELIVERY, envelope::decode_dead_letter),
            dead_letter: None,
            defer_after: Duration::MAX,
            max_waiting: MAX_WAITING,
        };
        let dlts = Domain::ALL.map(|domain| self.topics.dlt(domain).to_string());
        let sink = Intake { dead_letters: dead_letters.clone(), settings: self.settings.dlt.clone() };
        let options = self.pipeline_options(RetryPolicy::forever());
        self.start_group(DLT_INTAKE, Topics::Named(dlts.into()), reading, sink, options).await
    }

    fn start_dlt_retry(&self, dead_letters: &DeadLetterSource) {
        let dlt = &self.settings.dlt;
        let retry = RetryPolicy::Fixed { interval: dlt.retry_interval, max_attempts: Some(dlt.max_retry) };
        let options = RelayOptions {
            batch: dlt.batch_size,
            settle_batch: SETTLED_AT_ONCE,
            max_in_flight: LANES.dead_letters.items,
            max_bytes: LANES.dead_letters.bytes,
            drain: LONGEST_REQUEST.max(dlt.timeout),
            ..self.pipeline_options(retry)
        };
        let sink = DeadLetterDeliveries { dispatcher: self.dispatcher.clone(), timeout: dlt.timeout };
        let (first, again) = (dead_letters.clone(), dead_letters.clone());
        let make = move || {
            let source = again.clone();
            Box::pin(async move { Ok(source) }) as _
        };
        self.relays.start(DLT_RETRY, first, Box::new(make), sink, options);
    }

    fn pipeline_options(&self, retry: RetryPolicy) -> RelayOptions {
        RelayOptions {
            workers: 2,
            chunk: 500,
            poll_interval: self.settings.outbox.poll_interval,
            drain: self.settings.outbox.drain,
            on_stop: OnStop::Release,
            retry,
            ..RelayOptions::default()
        }
    }
}

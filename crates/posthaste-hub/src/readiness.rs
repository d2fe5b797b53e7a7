use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use posthaste_core::hub_store::Backlog;
use posthaste_core::{FaultKind, StoreError};
use posthaste_schema::SchemaRegistry;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::Hub;
use crate::channels::{CHANNEL_DISCOVERY, Channels};
use crate::hub::{DLT_INTAKE, DLT_RETRY, EVENT_PROCESSOR, LONGEST_REQUEST, OUTBOX_PROCESSOR};
use crate::roles::Role;
use crate::settings::Settings;
use crate::stalls::{StallDetector, WaitingWork};

/// How long the result of a check is reused, so that many probes a second cost as much as one.
const FRESH: Duration = Duration::from_secs(1);
/// A database that takes longer than this for a small write does not serve requests either.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// A bus or a registry outside of the database that takes longer than this to answer is away. Probes do not wait long.
const AWAY_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the whole look for waiting work may take.
const LOOK_TIMEOUT: Duration = Duration::from_secs(15);
const DATABASE: &str = "database";
const BUS: &str = "bus";
const REGISTRY: &str = "registry";
/// The parts that are always shown, and the role that they belong to. Channels and sources are shown only if they fail.
const PARTS: [(&str, Role); 6] = [
    ("ingest", Role::Ingest),
    (CHANNEL_DISCOVERY, Role::Channels),
    (EVENT_PROCESSOR, Role::Processor),
    (OUTBOX_PROCESSOR, Role::Delivery),
    (DLT_INTAKE, Role::Dlt),
    (DLT_RETRY, Role::Dlt),
];

/// The status of each part of the hub.
#[derive(Clone, Debug)]
pub struct Readiness {
    pub parts: BTreeMap<String, PartStatus>,
    /// The parts that make no progress while work waits, and why. Parts that wait for a dependency are not among them.
    pub(crate) stalled: BTreeMap<String, String>,
}

/// The status of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartStatus {
    Ready,
    /// The part does its other work, but an operator has to act, for this reason.
    Degraded(String),
    /// The part cannot do its work, for this reason.
    Unready(String),
}

impl Readiness {
    /// True if no part is unready.
    pub fn is_ready(&self) -> bool {
        !self.parts.values().any(|part| matches!(part, PartStatus::Unready(_)))
    }

    /// True if a part is degraded.
    pub fn is_degraded(&self) -> bool {
        self.parts.values().any(|part| matches!(part, PartStatus::Degraded(_)))
    }
}

/// Checks readiness, and remembers the last check.
pub(crate) struct ReadinessCheck {
    has_external_bus: bool,
    /// The Schema Registry, if it is not built in.
    registry: Option<Arc<dyn SchemaRegistry>>,
    /// How long the built-in bus keeps records that every group has done.
    retention: Option<Duration>,
    /// How long a relay may make no progress while work waits. The time of a request to an endpoint is added to it.
    pub(crate) stall_timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: Option<(Instant, Readiness)>,
    stalls: StallDetector,
}

impl ReadinessCheck {
    pub(crate) fn new(settings: &Settings, has_external_bus: bool, registry: Option<Arc<dyn SchemaRegistry>>) -> Self {
        // After a crash, work may wait for the end of a lease; an idle relay may sleep for its poll interval.
        let stall_timeout = settings.outbox.lease.max(2 * settings.outbox.poll_interval);
        let retention = settings.retention.log.filter(|_| !has_external_bus);
        Self { has_external_bus, registry, retention, stall_timeout, state: Mutex::default() }
    }

    /// True if the hub needs more than its database.
    fn has_external_dependency(&self) -> bool {
        self.has_external_bus || self.registry.is_some()
    }
}

impl Hub {
    /// True if the bus is not in the database.
    pub fn has_external_bus(&self) -> bool {
        self.readiness.has_external_bus
    }

    /// Checks that the database accepts writes, that the bus answers, that every task runs, and that no relay is stalled
    /// while work waits for it.
    pub async fn readiness(&self) -> Readiness {
        let check = &self.readiness;
        // Callers at the same time share one check.
        let mut state = check.state.lock().await;
        if let Some((at, last)) = &state.last
            && at.elapsed() < FRESH
        {
            return last.clone();
        }
        let mut failing = self.relays.supervisor().health().failing();
        let down = self.sources.down();
        let of_roles = PARTS.iter().filter(|(_, role)| self.roles.has(*role)).map(|(part, _)| *part);
        let mut parts: BTreeMap<String, PartStatus> =
            of_roles.chain([DATABASE]).map(|part| (part.to_owned(), PartStatus::Ready)).collect();
        if check.has_external_bus {
            parts.insert(BUS.to_owned(), PartStatus::Ready);
        }
        let registry = self.check_registry().await;
        let mut stalled = BTreeMap::new();
        let is_registry_away = matches!(registry, Some(PartStatus::Degraded(_)));
        parts.extend(registry.map(|status| (REGISTRY.to_owned(), status)));
        let waiting = match timeout(LOOK_TIMEOUT, self.waiting()).await {
            Ok(waiting) => waiting,
            Err(late) => Err(Away::Database(StoreError::new("look for waiting work", FaultKind::Transient, late))),
        };
        match waiting {
            // Events are accepted and kept until the registry is back. Nothing that waits for it counts as stalled.
            Ok((_, lost)) if is_registry_away => {
                state.stalls = StallDetector::default();
                parts.extend(lost.into_iter().map(|(part, reason)| (part, PartStatus::Degraded(reason))));
            }
            Ok((waiting, lost)) => {
                let held_back = self.relays.held_back();
                for (part, stall) in state.stalls.observe(Instant::now(), waiting) {
                    let waits_for = held_back.get(&part).filter(|_| check.has_external_dependency());
                    if waits_for.is_none() {
                        stalled.insert(part.clone(), stall.clone());
                    }
                    match waits_for {
                        // Events are accepted and kept, for example until a topic has enough replicas again.
                        Some(failure) => _ = parts.insert(part, PartStatus::Degraded(format!("{stall}; {failure}"))),
                        // The database of the service may be the reason. Everything else works.
                        None if Channels::is_relay_of_source(&part) => {
                            _ = parts.insert(part, PartStatus::Degraded(stall))
                        }
                        None => _ = failing.insert(part, stall),
                    }
                }
                parts.extend(lost.into_iter().map(|(part, reason)| (part, PartStatus::Degraded(reason))));
            }
            Err(Away::Database(error)) => _ = failing.insert(DATABASE.to_owned(), error.chain()),
            Err(Away::Bus(reason)) => {
                // Events are accepted and kept until the bus is back. Nothing that waits for it counts as stalled.
                state.stalls = StallDetector::default();
                parts.insert(BUS.to_owned(), PartStatus::Degraded(reason));
            }
        }
        // The other sources are read, and events are accepted.
        parts.extend(down.into_iter().map(|(source, reason)| (source, PartStatus::Degraded(reason))));
        parts.extend(failing.into_iter().map(|(part, reason)| (part, PartStatus::Unready(reason))));
        let readiness = Readiness { parts, stalled };
        state.last = Some((Instant::now(), readiness.clone()));
        readiness
    }

    /// True if this process runs a member of the group.
    fn runs(&self, group: &str) -> bool {
        PARTS.iter().any(|(part, role)| *part == group && self.roles.has(*role))
    }

    async fn check_database(&self) -> Result<(), StoreError> {
        let health = self.relays.supervisor().health();
        match timeout(WRITE_TIMEOUT, self.database.check_write(health.write_to_check())).await {
            Ok(written) => written.inspect(|()| health.write_succeeded()),
            Err(late) => Err(StoreError::new("write to the database", FaultKind::Transient, late)),
        }
    }

    /// The status of a Schema Registry that is not built in.
    async fn check_registry(&self) -> Option<PartStatus> {
        let registry = self.readiness.registry.as_ref()?;
        let reason = match timeout(AWAY_TIMEOUT, registry.check()).await {
            Ok(Ok(())) => return Some(PartStatus::Ready),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the schema registry did not answer within {} s", AWAY_TIMEOUT.as_secs()),
        };
        Some(PartStatus::Degraded(reason))
    }

    async fn backlogs(&self) -> Result<Vec<Backlog>, Away> {
        let backlogs = self.stores.inspector.backlogs();
        if !self.readiness.has_external_bus {
            return Ok(backlogs.await?);
        }
        match timeout(AWAY_TIMEOUT, backlogs).await {
            Ok(backlogs) => backlogs.map_err(|error| Away::Bus(error.chain())),
            Err(_) => Err(Away::Bus(format!("the bus did not answer within {} s", AWAY_TIMEOUT.as_secs()))),
        }
    }

    /// The work that waits now, and the parts that need an operator: those that cannot read a partition because its
    /// position is lost, and those that keep expired records from being removed. Nothing here reads more than a few rows.
    async fn waiting(&self) -> Result<(Vec<WaitingWork>, BTreeMap<String, String>), Away> {
        self.check_database().await?;
        let stall_timeout = self.readiness.stall_timeout;
        let with_requests = stall_timeout + LONGEST_REQUEST;
        let (mut waiting, mut lost) = (Vec::new(), BTreeMap::new());
        if let Some(searches) = self.channels.searches() {
            let (part, work) = (CHANNEL_DISCOVERY.to_owned(), "rows of other programs".to_owned());
            waiting.push(WaitingWork { part, work, progress: searches.to_string(), stall_timeout });
        }
        // Other processes may have claimed the rows that are due, so only rows that are due for long count.
        let mut due: BTreeSet<String> = self.channels.late_relays(stall_timeout / 2).into_iter().collect();
        due.extend(self.sources.late_relays(stall_timeout / 2));
        // Events that the bus did not accept are due later, but they still count as waiting work.
        due.extend(self.relays.held_back().into_keys().filter(|relay| Channels::is_relay(relay)));
        for part in due {
            let progress = self.relays.progress(&part).completed.to_string();
            waiting.push(WaitingWork { part, work: "due events".to_owned(), progress, stall_timeout });
        }
        for backlog in self.backlogs().await? {
            if backlog.is_position_lost {
                lost.entry(backlog.group.clone()).or_insert_with(|| lost_position(&backlog));
                continue;
            }
            if !self.runs(&backlog.group) {
                continue;
            }
            let is_requests = backlog.group == OUTBOX_PROCESSOR;
            waiting.push(WaitingWork {
                work: format!("partition {} of {}", backlog.partition, backlog.topic),
                // A record may need several requests, and each of them counts as progress.
                progress: match is_requests {
                    true => format!("{} {}", backlog.progress, self.relays.progress(&backlog.group).settled),
                    false => backlog.progress,
                },
                part: backlog.group,
                stall_timeout: if is_requests { with_requests } else { stall_timeout },
            });
        }
        if let Some(retention) = self.readiness.retention {
            for (group, lag) in self.stores.inspector.lag_of_groups().await? {
                if lag > retention {
                    lost.entry(group).or_insert_with(|| kept_by_retention(lag));
                }
            }
        }
        if self.roles.has(Role::Dlt) && self.stores.dead_letters.is_due().await? {
            // Dead letters of an endpoint that hangs are due and wait. A look at them is progress.
            let progress = self.dead_letters.looks().to_string();
            let (part, work) = (DLT_RETRY.to_owned(), "due dead letters".to_owned());
            waiting.push(WaitingWork { part, work, progress, stall_timeout: with_requests });
        }
        Ok((waiting, lost))
    }
}

/// What did not answer.
enum Away {
    Database(StoreError),
    /// The bus outside of the database, and why.
    Bus(String),
}

impl From<StoreError> for Away {
    fn from(error: StoreError) -> Self {
        Self::Database(error)
    }
}

fn kept_by_retention(lag: Duration) -> String {
    let hours = lag.as_secs() / 3600;
    format!(
        "the oldest record that the group has not done is {hours} h old: expired records of its topics are kept until it \
         has done them; run `posthaste topics lag` to see where it waits"
    )
}

fn lost_position(backlog: &Backlog) -> String {
    let Backlog { group, topic, partition, .. } = backlog;
    format!(
        "partition {partition} of {topic} is not read: the position of the group does not exist; run `posthaste topics \
         reset {topic} --group {group} --partition {partition} --to earliest`, or latest"
    )
}

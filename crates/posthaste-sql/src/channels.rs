//! How events are stored and channels recorded, the same on every database. This module has the order of the steps, and
//! [`ChannelStatements`] the statements of one database.

use std::sync::Arc;

use async_trait::async_trait;
use posthaste_core::Event;
use posthaste_core::hub_store::{Admission, BatchOwners, Ingested, Refusal};

/// The statements of one transaction.
#[async_trait]
pub(crate) trait ChannelStatements: Send {
    /// The recorded owners of these topics, as topic key and event type, and how many channels are recorded.
    async fn owners(&mut self, topic_keys: &[String]) -> Result<(Vec<(String, String)>, i64), sqlx::Error>;

    /// Keeps other processes from recording channels until the transaction ends. Returns false if there are none.
    async fn lock(&mut self) -> Result<bool, sqlx::Error>;

    /// The event types with these topic keys that have unfinished rows, including rows that are not due.
    async fn unfinished_types(&mut self, topic_keys: &[String]) -> Result<Vec<String>, sqlx::Error>;

    /// Records channels, as topic key and event type.
    async fn record(&mut self, channels: Vec<(String, String)>) -> Result<(), sqlx::Error>;

    /// Stores new events in the outbox.
    async fn store(&mut self, events: &[Arc<Event>], atomic: bool) -> Result<Vec<Ingested>, sqlx::Error>;
}

/// One transaction that may record channels.
pub(crate) struct Batch<S> {
    statements: S,
    owners: BatchOwners,
}

impl<S: ChannelStatements> Batch<S> {
    pub(crate) fn new(statements: S, owners: BatchOwners) -> Self {
        Self { statements, owners }
    }

    /// Records channels of these types. Returns the results in the same order, and the owners after that.
    pub(crate) async fn record(
        mut self,
        event_types: &[String],
    ) -> Result<(Vec<Result<(), Refusal>>, BatchOwners), sqlx::Error> {
        self.read_owners().await?;
        let (mut results, mut new) = (Vec::with_capacity(event_types.len()), Vec::new());
        for event_type in event_types {
            let result = self.owners.check(event_type);
            if result.is_ok() {
                new.extend(self.own(event_type));
            }
            results.push(result);
        }
        self.record_new(new).await?;
        Ok((results, self.owners))
    }

    /// Stores events. Returns the results in the same order, and the owners after that.
    pub(crate) async fn ingest(
        mut self,
        events: &[Arc<Event>],
        atomic: bool,
    ) -> Result<(Vec<Admission>, BatchOwners), sqlx::Error> {
        self.read_owners().await?;
        let results = match atomic {
            true => self.ingest_atomic(events).await?,
            false => self.ingest_each(events).await?,
        };
        Ok((results, self.owners))
    }

    async fn ingest_each(&mut self, events: &[Arc<Event>]) -> Result<Vec<Admission>, sqlx::Error> {
        let mut results = Vec::with_capacity(events.len());
        let mut rest = events;
        while !rest.is_empty() {
            let (part, later) = rest.split_at(self.owners.independent(rest));
            results.extend(self.store(part, self.owners.refusals(part), false).await?);
            rest = later;
        }
        Ok(results)
    }

    async fn ingest_atomic(&mut self, events: &[Arc<Event>]) -> Result<Vec<Admission>, sqlx::Error> {
        let refusals = self.owners.refusals_of_atomic(events);
        match refusals.iter().any(Option::is_some) {
            true => Ok(Admission::merge(refusals, [])),
            false => self.store(events, refusals, true).await,
        }
    }

    /// Stores the events that are not refused, and records the types of those that were stored.
    async fn store(
        &mut self,
        events: &[Arc<Event>],
        refusals: Vec<Option<Refusal>>,
        atomic: bool,
    ) -> Result<Vec<Admission>, sqlx::Error> {
        let admitted = events.iter().zip(&refusals).filter(|(_, refusal)| refusal.is_none());
        let admitted: Vec<Arc<Event>> = admitted.map(|(event, _)| event.clone()).collect();
        let ingested = self.statements.store(&admitted, atomic).await?;
        let mut new = Vec::new();
        for (event, ingested) in admitted.iter().zip(&ingested) {
            if *ingested == Ingested::Stored {
                new.extend(self.own(event.event_type()));
            }
        }
        self.record_new(new).await?;
        Ok(Admission::merge(refusals, ingested))
    }

    /// Reads the owners that are not in the cache. Unless all are recorded, this transaction records channels, and a type
    /// with pending rows of other programs owns its topic from now on.
    async fn read_owners(&mut self) -> Result<(), sqlx::Error> {
        if self.owners.unknown().is_empty() {
            return Ok(());
        }
        self.read_recorded().await?;
        if self.owners.are_complete() {
            return Ok(());
        }
        if self.statements.lock().await? {
            // Another process may have recorded channels before this one got the lock.
            self.read_recorded().await?;
        }
        let mut new = Vec::new();
        for event_type in self.statements.unfinished_types(self.owners.unknown()).await? {
            if self.owners.check(&event_type).is_ok() {
                new.extend(self.own(&event_type));
            }
        }
        self.record_new(new).await
    }

    async fn read_recorded(&mut self) -> Result<(), sqlx::Error> {
        let (recorded, count) = self.statements.owners(self.owners.unknown()).await?;
        self.owners.add_recorded(recorded, usize::try_from(count).unwrap_or_default());
        Ok(())
    }

    /// Makes the type the owner of its topic. Returns the topic key and the type if they must be recorded.
    fn own(&mut self, event_type: &str) -> Option<(String, String)> {
        let key = self.owners.unrecorded_key(event_type)?;
        self.owners.recorded(key.clone(), event_type);
        Some((key, event_type.to_owned()))
    }

    async fn record_new(&mut self, new: Vec<(String, String)>) -> Result<(), sqlx::Error> {
        if new.is_empty() { Ok(()) } else { self.statements.record(new).await }
    }
}

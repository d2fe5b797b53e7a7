use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::future::join_all;
use posthaste_core::outbox::Table;
use posthaste_core::{Event, StoreError};
use posthaste_sql::sqlite::{Ingested, OutboxStore};
use tokio::sync::{mpsc, oneshot};

use crate::channels::{ChannelError, Channels};

/// How many events share one insert at most, and how many requests may wait for it.
const GROUP: usize = 1_000;
const WAITING: usize = 4_096;

/// The door: accepts events, and answers when they are committed.
///
/// Requests that wait together are inserted together, so many small publishes cost about as much as one large.
#[derive(Clone)]
pub struct Ingest {
    requests: mpsc::Sender<Request>,
    channels: Channels,
}

struct Request {
    events: Vec<Arc<Event>>,
    atomic: bool,
    reply: oneshot::Sender<Result<Vec<Ingested>, Arc<StoreError>>>,
}

/// What became of one event of a request.
#[derive(Debug)]
pub enum Accepted {
    Stored,
    /// The same event was here before; nothing is stored twice.
    Known,
    /// Another event has this id; the first stays.
    Conflict,
    Refused(ChannelError),
    /// Nothing is wrong with it, but something is with its atomic request.
    Withheld,
}

/// Nothing of the request is known to be stored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IngestError {
    #[error("the events could not be stored")]
    Store(#[source] Arc<StoreError>),
    #[error("the server is stopping")]
    Stopping,
}

impl Ingest {
    pub(crate) fn start(outbox: Table<OutboxStore>, channels: Channels) -> Self {
        let (requests, waiting) = mpsc::channel(WAITING);
        tokio::spawn(serve(outbox, waiting));
        Self { requests, channels }
    }

    /// Answers in the order of the events. An `atomic` request stores all of them or none.
    pub async fn publish(&self, events: Vec<Event>, atomic: bool) -> Result<Vec<Accepted>, IngestError> {
        let mut answers: Vec<Option<Accepted>> = Vec::with_capacity(events.len());
        let mut admitted = Vec::with_capacity(events.len());
        for event in events {
            match self.channels.admit(event.event_type()) {
                Ok(()) => {
                    admitted.push(Arc::new(event));
                    answers.push(None);
                }
                Err(error) => answers.push(Some(Accepted::Refused(error))),
            }
        }
        let withheld = atomic && admitted.len() < answers.len();
        let mut stored = match admitted.is_empty() || withheld {
            true => Vec::new(),
            false => self.store(admitted, atomic).await?,
        }
        .into_iter();
        let answer_of = |answer: Option<Accepted>| {
            answer.unwrap_or_else(|| match stored.next() {
                Some(Ingested::Stored) => Accepted::Stored,
                Some(Ingested::Known) => Accepted::Known,
                Some(Ingested::Conflict) => Accepted::Conflict,
                Some(Ingested::Withheld) | None => Accepted::Withheld,
            })
        };
        Ok(answers.into_iter().map(answer_of).collect())
    }

    async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Vec<Ingested>, IngestError> {
        let (reply, answer) = oneshot::channel();
        let request = Request { events, atomic, reply };
        self.requests.send(request).await.map_err(|_| IngestError::Stopping)?;
        answer.await.map_err(|_| IngestError::Stopping)?.map_err(IngestError::Store)
    }
}

async fn serve(outbox: Table<OutboxStore>, mut requests: mpsc::Receiver<Request>) {
    while let Some(first) = requests.recv().await {
        let mut size = first.events.len();
        let mut group = vec![first];
        while size < GROUP
            && let Ok(request) = requests.try_recv()
        {
            size += request.events.len();
            group.push(request);
        }
        let (atomic, plain): (Vec<_>, Vec<_>) = group.into_iter().partition(|request| request.atomic);
        let atomic = join_all(atomic.into_iter().map(|request| store_alone(&outbox, request)));
        tokio::join!(store_together(&outbox, plain), atomic);
    }
}

async fn store_together(outbox: &Table<OutboxStore>, group: Vec<Request>) {
    if group.is_empty() {
        return;
    }
    let events: Vec<_> = group.iter().flat_map(|request| request.events.iter().cloned()).collect();
    match outbox.store().ingest(events.clone()).await {
        Ok(ingested) => {
            wake(outbox, &events, &ingested);
            let mut ingested = ingested.into_iter();
            for request in group {
                let answer = ingested.by_ref().take(request.events.len()).collect();
                // Whoever asked may have gone; the events are stored all the same.
                let _ = request.reply.send(Ok(answer));
            }
        }
        // What is wrong with one request must not be the others' failure.
        Err(_) => drop(join_all(group.into_iter().map(|request| store_alone(outbox, request))).await),
    }
}

async fn store_alone(outbox: &Table<OutboxStore>, request: Request) {
    let events = request.events.clone();
    let stored = match request.atomic {
        true => outbox.store().ingest_atomic(events).await,
        false => outbox.store().ingest(events).await,
    };
    if let Ok(ingested) = &stored {
        wake(outbox, &request.events, ingested);
    }
    let _ = request.reply.send(stored.map_err(Arc::new));
}

/// Makes the channels of what is stored look now.
fn wake(outbox: &Table<OutboxStore>, events: &[Arc<Event>], ingested: &[Ingested]) {
    let stored = events.iter().zip(ingested).filter(|(_, ingested)| **ingested == Ingested::Stored);
    let types: BTreeSet<&str> = stored.map(|(event, _)| event.event_type()).collect();
    types.into_iter().for_each(|event_type| outbox.wake(event_type));
}

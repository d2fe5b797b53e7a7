use std::sync::Arc;

use futures_util::future::join_all;
use posthaste_core::{Event, StoreError};
use posthaste_sql::sqlite::Ingested;
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
}

/// One answer per event, in the order of the events.
type Answers = Vec<Result<Ingested, ChannelError>>;

struct Request {
    events: Vec<Arc<Event>>,
    atomic: bool,
    reply: oneshot::Sender<Result<Answers, Arc<StoreError>>>,
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
    pub(crate) fn start(channels: Channels) -> Self {
        let (requests, waiting) = mpsc::channel(WAITING);
        tokio::spawn(serve(channels, waiting));
        Self { requests }
    }

    /// Answers in the order of the events. An `atomic` request stores all of them or none.
    pub async fn publish(&self, events: Vec<Event>, atomic: bool) -> Result<Vec<Accepted>, IngestError> {
        let mut answers: Vec<Option<Accepted>> = Vec::with_capacity(events.len());
        let mut named = Vec::with_capacity(events.len());
        for event in events {
            match Channels::check_name(event.event_type()) {
                Ok(()) => {
                    named.push(Arc::new(event));
                    answers.push(None);
                }
                Err(error) => answers.push(Some(Accepted::Refused(error))),
            }
        }
        let withheld = atomic && named.len() < answers.len();
        let mut stored = match named.is_empty() || withheld {
            true => Vec::new(),
            false => self.store(named, atomic).await?,
        }
        .into_iter();
        let answer_of = |answer: Option<Accepted>| {
            answer.unwrap_or_else(|| match stored.next() {
                Some(Ok(Ingested::Stored)) => Accepted::Stored,
                Some(Ok(Ingested::Known)) => Accepted::Known,
                Some(Ok(Ingested::Conflict)) => Accepted::Conflict,
                Some(Ok(Ingested::Withheld)) | None => Accepted::Withheld,
                Some(Err(error)) => Accepted::Refused(error),
            })
        };
        Ok(answers.into_iter().map(answer_of).collect())
    }

    async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<Answers, IngestError> {
        let (reply, answer) = oneshot::channel();
        let request = Request { events, atomic, reply };
        self.requests.send(request).await.map_err(|_| IngestError::Stopping)?;
        answer.await.map_err(|_| IngestError::Stopping)?.map_err(IngestError::Store)
    }
}

async fn serve(channels: Channels, mut requests: mpsc::Receiver<Request>) {
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
        let atomic = join_all(atomic.into_iter().map(|request| store_alone(&channels, request)));
        tokio::join!(store_together(&channels, plain), atomic);
    }
}

async fn store_together(channels: &Channels, group: Vec<Request>) {
    if group.is_empty() {
        return;
    }
    let events: Vec<_> = group.iter().flat_map(|request| request.events.iter().cloned()).collect();
    match channels.store(events, false).await {
        Ok(answers) => {
            let mut answers = answers.into_iter();
            for request in group {
                let answer = answers.by_ref().take(request.events.len()).collect();
                // The caller may have gone; its events are stored all the same.
                let _ = request.reply.send(Ok(answer));
            }
        }
        // What is wrong with one request must not be the others' failure.
        Err(_) => drop(join_all(group.into_iter().map(|request| store_alone(channels, request))).await),
    }
}

async fn store_alone(channels: &Channels, request: Request) {
    let stored = channels.store(request.events, request.atomic).await;
    let _ = request.reply.send(stored.map_err(Arc::new));
}

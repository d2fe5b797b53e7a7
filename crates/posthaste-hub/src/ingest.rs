use std::sync::Arc;

use futures_util::future::{BoxFuture, join_all};
use posthaste_core::hub_store::Ingested;
use posthaste_core::{Event, FaultKind, StoreError};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::channels::{ChannelError, Channels};
use crate::supervisor::Supervisor;

/// The maximum number of events in one insert, and of requests that wait for it.
const GROUP: usize = 1_000;
const WAITING: usize = 4_096;

/// Accepts events, and returns when they are committed.
///
/// Requests that wait together are inserted together, so many small publishes cost about as much as one large.
#[derive(Clone)]
pub struct Ingest {
    requests: mpsc::Sender<Request>,
}

/// One result per event, in the order of the events.
pub(crate) type StoreResults = Vec<Result<Ingested, ChannelError>>;

/// Stores events and returns after the commit. If the second argument is true, it stores all events or none.
pub(crate) type StoreEvents =
    Arc<dyn Fn(Vec<Arc<Event>>, bool) -> BoxFuture<'static, Result<StoreResults, StoreError>> + Send + Sync>;

struct Request {
    events: Vec<Arc<Event>>,
    atomic: bool,
    reply: oneshot::Sender<Result<StoreResults, Arc<StoreError>>>,
}

/// The result for one event of a request.
#[derive(Debug)]
pub enum Accepted {
    Stored,
    /// The same event was stored before, and is not stored again.
    Known,
    /// Another event has this id. The stored event stays as it is.
    Conflict,
    Refused(ChannelError),
    /// It could have been stored, but another event of its atomic request could not.
    Withheld,
}

/// Why a request failed. Some of its events may be stored nevertheless.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IngestError {
    #[error("the events could not be stored")]
    Store(#[source] Arc<StoreError>),
    #[error("the server is stopping")]
    Stopping,
}

impl Ingest {
    pub(crate) fn start(store: StoreEvents, supervisor: &Supervisor) -> Self {
        let (requests, waiting) = mpsc::channel(WAITING);
        let waiting = Arc::new(Mutex::new(waiting));
        let stop = supervisor.stopping().clone();
        supervisor.spawn("ingest", move || serve(store.clone(), waiting.clone(), stop.clone()));
        Self { requests }
    }

    /// Stores events. Returns the results in the order of the events. An `atomic` request stores all events or none.
    pub async fn publish(&self, events: Vec<Event>, atomic: bool) -> Result<Vec<Accepted>, IngestError> {
        let mut results: Vec<Option<Accepted>> = Vec::with_capacity(events.len());
        let mut named = Vec::with_capacity(events.len());
        for event in events {
            match Channels::check_name(event.event_type()) {
                Ok(()) => {
                    named.push(Arc::new(event));
                    results.push(None);
                }
                Err(error) => results.push(Some(Accepted::Refused(error))),
            }
        }
        let withheld = atomic && named.len() < results.len();
        let mut stored = match named.is_empty() || withheld {
            true => Vec::new(),
            false => self.store(named, atomic).await?,
        }
        .into_iter();
        let result_of = |result: Option<Accepted>| {
            result.unwrap_or_else(|| match stored.next() {
                Some(Ok(Ingested::Stored)) => Accepted::Stored,
                Some(Ok(Ingested::Known)) => Accepted::Known,
                Some(Ok(Ingested::Conflict)) => Accepted::Conflict,
                Some(Ok(Ingested::Withheld)) | None => Accepted::Withheld,
                Some(Err(error)) => Accepted::Refused(error),
            })
        };
        Ok(results.into_iter().map(result_of).collect())
    }

    async fn store(&self, events: Vec<Arc<Event>>, atomic: bool) -> Result<StoreResults, IngestError> {
        let (reply, result) = oneshot::channel();
        let request = Request { events, atomic, reply };
        self.requests.send(request).await.map_err(|_| IngestError::Stopping)?;
        match result.await {
            Ok(stored) => stored.map_err(IngestError::Store),
            // The ingest task failed while it had the request.
            Err(lost) => {
                let lost = StoreError::new("store events in the outbox", FaultKind::OutcomeUnknown, lost);
                Err(IngestError::Store(Arc::new(lost)))
            }
        }
    }
}

/// Queued requests survive a panic of this task: the restarted task serves them.
async fn serve(store: StoreEvents, requests: Arc<Mutex<mpsc::Receiver<Request>>>, stop: CancellationToken) {
    let mut requests = requests.lock().await;
    loop {
        let first = tokio::select! {
            biased;
            first = requests.recv() => first,
            () = stop.cancelled() => {
                // Requests in the queue are still served. Later requests fail with `Stopping`.
                requests.close();
                requests.recv().await
            }
        };
        let Some(first) = first else { return };
        let mut size = first.events.len();
        let mut group = vec![first];
        while size < GROUP
            && let Ok(request) = requests.try_recv()
        {
            size += request.events.len();
            group.push(request);
        }
        let (atomic, plain): (Vec<_>, Vec<_>) = group.into_iter().partition(|request| request.atomic);
        let atomic = join_all(atomic.into_iter().map(|request| store_alone(&store, request)));
        tokio::join!(store_together(&store, plain), atomic);
    }
}

async fn store_together(store: &StoreEvents, group: Vec<Request>) {
    if group.is_empty() {
        return;
    }
    let events: Vec<_> = group.iter().flat_map(|request| request.events.iter().cloned()).collect();
    match store(events, false).await {
        Ok(results) => {
            let mut results = results.into_iter();
            for request in group {
                let result = results.by_ref().take(request.events.len()).collect();
                // The caller may have stopped waiting. Its events are stored all the same.
                let _ = request.reply.send(Ok(result));
            }
        }
        // One bad request must not fail the others.
        Err(_) => drop(join_all(group.into_iter().map(|request| store_alone(store, request))).await),
    }
}

async fn store_alone(store: &StoreEvents, request: Request) {
    let stored = store(request.events, request.atomic).await;
    let _ = request.reply.send(stored.map_err(Arc::new));
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn event() -> Event {
        Event::builder("order.placed").text("{}".to_owned()).build().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_accepted_again_after_a_panic_of_the_ingest_task() {
        let (supervisor, calls) = (Supervisor::default(), Arc::new(AtomicUsize::new(0)));
        let counted = calls.clone();
        let store: StoreEvents = Arc::new(move |events, _| {
            assert!(counted.fetch_add(1, Ordering::Relaxed) > 0, "the first call fails");
            Box::pin(async move { Ok(events.iter().map(|_| Ok(Ingested::Stored)).collect()) })
        });
        let ingest = Ingest::start(store, &supervisor);
        let Err(IngestError::Store(error)) = ingest.publish(vec![event()], false).await else {
            panic!("the first publish must fail");
        };
        assert_eq!(error.kind(), FaultKind::OutcomeUnknown, "it may have been stored");
        let second = ingest.publish(vec![event()], false).await.unwrap();
        assert!(matches!(second[..], [Accepted::Stored]), "{second:?}");
        supervisor.stop().await;
        assert!(matches!(ingest.publish(vec![event()], false).await, Err(IngestError::Stopping)));
    }

    #[tokio::test(start_paused = true)]
    async fn readiness_names_an_ingest_task_that_keeps_failing() {
        let supervisor = Supervisor::default();
        let store: StoreEvents = Arc::new(|_, _| panic!("broken"));
        let ingest = Ingest::start(store, &supervisor);
        for _ in 0..3 {
            ingest.publish(vec![event()], false).await.unwrap_err();
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert!(supervisor.health().failing()["ingest"].contains("broken"));
        supervisor.stop().await;
    }
}

use std::sync::Arc;
use std::time::Duration;

use crate::{Event, ListenerSink, Listeners, OnStop, Relay, RelayOptions, RetryPolicy, Source};

/// How a service hands its own events to its own listeners.
#[derive(Clone, Debug)]
pub struct DispatcherOptions {
    /// How many listeners run at once.
    pub workers: usize,
    pub retry: RetryPolicy,
    /// How often the table is asked without a wake-up.
    pub poll_interval: Duration,
    pub batch_size: usize,
    /// How many events may be claimed and not yet settled.
    pub queue: usize,
    /// How long a stop waits for running and queued events.
    pub drain: Duration,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self {
            workers: 4,
            retry: RetryPolicy::default(),
            poll_interval: Duration::from_secs(5),
            batch_size: 500,
            queue: 1_000,
            drain: Duration::from_secs(5),
        }
    }
}

/// The relay of the outbox library: from an outbox table to the listeners in this process.
///
/// Run it beside the service: `tokio::spawn(dispatcher(source, listeners, options).run(stop))`.
pub fn dispatcher<S>(source: S, listeners: Listeners, options: DispatcherOptions) -> Relay<S, ListenerSink<S::Item>>
where
    S: Source,
    S::Item: AsRef<Arc<Event>>,
{
    let options = RelayOptions {
        workers: options.workers,
        // One at a time for each worker: an event never waits behind a slow one while another worker is free.
        chunk: 1,
        batch: options.batch_size,
        max_in_flight: options.queue,
        poll_interval: options.poll_interval,
        retry: options.retry,
        drain: options.drain,
        on_stop: OnStop::Deliver,
        ..RelayOptions::default()
    };
    Relay::new("dispatcher", Arc::new(source), Arc::new(listeners.into_sink()), options)
}

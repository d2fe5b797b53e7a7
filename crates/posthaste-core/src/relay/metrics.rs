use metrics::{Counter, Gauge, Histogram};
use std::time::Duration;

use crate::metric_names as names;
use crate::{Disposition, Settled};

/// The metrics of a relay. It counts as it works and never scans a table.
pub(super) struct RelayMetrics {
    hot: Counter,
    hot_dropped: Counter,
    hot_skipped_delayed: Counter,
    claimed: Counter,
    success: Counter,
    failure: Counter,
    dead: Counter,
    deferred: Counter,
    lost: Counter,
    refused: Counter,
    in_flight: Gauge,
    unsettled: Gauge,
    hot_depth: Gauge,
    cold_depth: Gauge,
    duration: Histogram,
    prefix: String,
    relay: String,
}

impl RelayMetrics {
    pub(super) fn new(prefix: &str, relay: &str, shared_label: Option<&str>) -> Self {
        let relay = shared_label.unwrap_or(relay);
        let counter = |name: &str| metrics::counter!(names::prefixed(prefix, name), "relay" => relay.to_owned());
        let gauge = |name: &str| match shared_label {
            None => metrics::gauge!(names::prefixed(prefix, name), "relay" => relay.to_owned()),
            Some(_) => Gauge::noop(),
        };
        let duration = names::prefixed(prefix, names::DISPATCH_DURATION);
        Self {
            hot: counter(names::ENQUEUE_HOT),
            hot_dropped: counter(names::ENQUEUE_HOT_DROPPED),
            hot_skipped_delayed: counter(names::ENQUEUE_HOT_SKIPPED_DELAYED),
            claimed: counter(names::ENQUEUE_COLD),
            success: counter(names::DISPATCH_SUCCESS),
            failure: counter(names::DISPATCH_FAILURE),
            dead: counter(names::DISPATCH_DEAD),
            deferred: counter(names::DISPATCH_DEFERRED),
            lost: counter(names::LOST_LEASES),
            refused: counter(names::SETTLE_REFUSED),
            in_flight: gauge(names::IN_FLIGHT),
            unsettled: gauge(names::UNSETTLED),
            hot_depth: gauge(names::QUEUE_HOT_DEPTH),
            cold_depth: gauge(names::QUEUE_COLD_DEPTH),
            duration: metrics::histogram!(duration, "relay" => relay.to_owned()),
            prefix: prefix.to_owned(),
            relay: relay.to_owned(),
        }
    }

    pub(super) fn hot(&self, count: usize) {
        self.hot.increment(count as u64);
    }

    pub(super) fn hot_dropped(&self) {
        self.hot_dropped.increment(1);
    }

    pub(super) fn hot_skipped_delayed(&self) {
        self.hot_skipped_delayed.increment(1);
    }

    pub(super) fn claimed(&self, count: usize) {
        self.claimed.increment(count as u64);
    }

    pub(super) fn depths(&self, in_flight: usize, (hot, cold): (usize, usize)) {
        self.in_flight.set(in_flight as f64);
        self.hot_depth.set(hot as f64);
        self.cold_depth.set(cold as f64);
    }

    /// Registers the metric at the first panic, so that a healthy relay does not have it.
    pub(super) fn panicked(&self, task: &'static str) {
        let name = names::prefixed(&self.prefix, names::TASK_PANICS);
        metrics::counter!(name, "task" => format!("{}:{task}", self.relay)).increment(1);
    }

    pub(super) fn refused(&self) {
        self.refused.increment(1);
    }

    pub(super) fn unsettled(&self, count: usize) {
        self.unsettled.set(count as f64);
    }

    pub(super) fn lost(&self, count: usize) {
        self.lost.increment(count as u64);
    }

    pub(super) fn settled(&self, disposition: &Disposition, settled: Settled, took: Duration) {
        let counter = match (settled, disposition) {
            (Settled::Locked, _) => return,
            (Settled::LostLease, _) => &self.lost,
            (_, Disposition::Done) => &self.success,
            (_, Disposition::Retry { failure: None, .. }) => &self.deferred,
            (_, Disposition::Retry { .. }) => &self.failure,
            (_, Disposition::Dead(_)) => &self.dead,
        };
        counter.increment(1);
        self.duration.record(took.as_secs_f64());
    }
}

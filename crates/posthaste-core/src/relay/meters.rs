use metrics::{Counter, Gauge, Histogram};
use std::time::Duration;

use crate::{Disposition, Settled};

/// What a relay counts, from its own events and never from a table scan.
pub(super) struct Meters {
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

impl Meters {
    pub(super) fn new(prefix: &str, relay: &str) -> Self {
        let counter = |name: &str| metrics::counter!(format!("{prefix}_{name}"), "relay" => relay.to_owned());
        let gauge = |name: &str| metrics::gauge!(format!("{prefix}_{name}"), "relay" => relay.to_owned());
        let duration = format!("{prefix}_dispatch_duration_seconds");
        Self {
            hot: counter("enqueue_hot_total"),
            hot_dropped: counter("enqueue_hot_dropped_total"),
            hot_skipped_delayed: counter("enqueue_hot_skipped_delayed_total"),
            claimed: counter("enqueue_cold_total"),
            success: counter("dispatch_success_total"),
            failure: counter("dispatch_failure_total"),
            dead: counter("dispatch_dead_total"),
            deferred: counter("dispatch_deferred_total"),
            lost: counter("lost_leases_total"),
            refused: counter("settle_refused_total"),
            in_flight: gauge("in_flight"),
            unsettled: gauge("unsettled"),
            hot_depth: gauge("queue_hot_depth"),
            cold_depth: gauge("queue_cold_depth"),
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

    pub(super) fn level(&self, in_flight: usize, (hot, cold): (usize, usize)) {
        self.in_flight.set(in_flight as f64);
        self.hot_depth.set(hot as f64);
        self.cold_depth.set(cold as f64);
    }

    /// Counted by name when it happens: no healthy relay has this metric.
    pub(super) fn panicked(&self, task: &'static str) {
        let name = format!("{}_task_panics_total", self.prefix);
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

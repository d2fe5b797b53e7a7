use metrics::{Counter, Gauge, Histogram};
use std::time::Duration;

use crate::{Disposition, Settled};

/// What a relay counts, from its own events and never from a table scan.
pub(super) struct Meters {
    claimed: Counter,
    success: Counter,
    failure: Counter,
    dead: Counter,
    deferred: Counter,
    lost: Counter,
    in_flight: Gauge,
    queued: Gauge,
    duration: Histogram,
}

impl Meters {
    pub(super) fn new(relay: &str) -> Self {
        let counter = |name: &'static str| metrics::counter!(name, "relay" => relay.to_owned());
        let gauge = |name: &'static str| metrics::gauge!(name, "relay" => relay.to_owned());
        Self {
            claimed: counter("posthaste_enqueue_cold_total"),
            success: counter("posthaste_dispatch_success_total"),
            failure: counter("posthaste_dispatch_failure_total"),
            dead: counter("posthaste_dispatch_dead_total"),
            deferred: counter("posthaste_dispatch_deferred_total"),
            lost: counter("posthaste_lost_leases_total"),
            in_flight: gauge("posthaste_in_flight"),
            queued: gauge("posthaste_queue_cold_depth"),
            duration: metrics::histogram!("posthaste_dispatch_duration_seconds", "relay" => relay.to_owned()),
        }
    }

    pub(super) fn claimed(&self, count: usize) {
        self.claimed.increment(count as u64);
    }

    pub(super) fn level(&self, in_flight: usize, queued: usize) {
        self.in_flight.set(in_flight as f64);
        self.queued.set(queued as f64);
    }

    pub(super) fn lost(&self, count: usize) {
        self.lost.increment(count as u64);
    }

    pub(super) fn settled(&self, disposition: &Disposition, settled: Settled, took: Duration) {
        let counter = match (settled, disposition) {
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

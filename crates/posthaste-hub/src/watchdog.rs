use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use posthaste_core::metric_names::{RELAY_RESTARTS, RELAY_STALLED};
use tokio::time::{Instant, sleep};

use crate::Hub;
use crate::channels::Channels;

/// How often the watchdog looks, at most and at least.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);
const LONGEST_INTERVAL: Duration = Duration::from_secs(10);

/// A relay is restarted only if it has made no progress for this long, and again only after the second time, however short a
/// lease is. A restart takes part in a rebalance, and a bus may need many seconds for one: restarts that follow each other
/// faster would keep the relay from its work.
const SHORTEST_STALL: Duration = Duration::from_secs(20);
const SHORTEST_RESTART_INTERVAL: Duration = Duration::from_secs(60);

/// Starts the task that looks for relays that make no progress while work waits, and restarts them.
///
/// It sees what readiness sees, also when nobody asks for readiness. A relay that waits for a bus or a registry is not
/// restarted, because that would not help.
pub(crate) fn start(hub: &Arc<Hub>) {
    // The hub owns its tasks, so a task must not own the hub.
    let hub = Arc::downgrade(hub);
    let Some(supervisor) = hub.upgrade().map(|hub| hub.relays.supervisor().clone()) else { return };
    let stop = supervisor.stopping().clone();
    supervisor.spawn("watchdog", move || {
        let (hub, stop) = (hub.clone(), stop.clone());
        async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = watch(&hub) => {}
            }
        }
    });
}

async fn watch(hub: &Weak<Hub>) {
    let mut watchdog = Watchdog::default();
    loop {
        let Some(hub) = hub.upgrade() else { return };
        let stall_timeout = hub.readiness.stall_timeout;
        for (relay, reason) in &hub.readiness().await.stalled {
            watchdog.stalled(relay, Instant::now());
            if watchdog.may_restart(relay, Instant::now(), stall_timeout) {
                match hub.relays.restart(relay) {
                    true => {
                        metrics::counter!(RELAY_RESTARTS, "relay" => Channels::label(relay)).increment(1);
                        tracing::error!(relay, reason, "a relay makes no progress and is restarted");
                    }
                    // A part that is not a relay continues by itself.
                    false => tracing::error!(part = relay, reason, "a part makes no progress"),
                }
            }
        }
        watchdog.report();
        drop(hub);
        sleep((stall_timeout / 3).clamp(SHORTEST_INTERVAL, LONGEST_INTERVAL)).await;
    }
}

/// What the watchdog remembers from one look to the next.
#[derive(Default)]
struct Watchdog {
    restarted: HashMap<String, Instant>,
    /// Since when each relay is known to be stalled. That is a stall timeout after its last progress.
    since: HashMap<String, Instant>,
    /// The relays that were stalled at the last look, and those that are at this one.
    before: HashSet<String>,
    now: HashSet<String>,
}

impl Watchdog {
    fn stalled(&mut self, relay: &str, now: Instant) {
        self.now.insert(relay.to_owned());
        self.since.entry(relay.to_owned()).or_insert(now);
    }

    /// True if the relay is stalled for long, and was not restarted for so long that the restart did not help.
    fn may_restart(&mut self, relay: &str, now: Instant, stall_timeout: Duration) -> bool {
        let interval = (2 * stall_timeout).max(SHORTEST_RESTART_INTERVAL);
        let is_early = |restarted: &Instant| now.duration_since(*restarted) < interval;
        let known_for = self.since.get(relay).map_or(Duration::ZERO, |since| now.duration_since(*since));
        if stall_timeout + known_for < SHORTEST_STALL || self.restarted.get(relay).is_some_and(is_early) {
            return false;
        }
        self.restarted.insert(relay.to_owned(), now);
        true
    }

    /// Sets the gauge of each relay that is or was stalled.
    fn report(&mut self) {
        let now = std::mem::take(&mut self.now);
        let labels = |relays: &HashSet<String>| relays.iter().map(|relay| Channels::label(relay)).collect();
        let (stalled, before): (HashSet<String>, HashSet<String>) = (labels(&now), labels(&self.before));
        for label in stalled.union(&before) {
            let is_stalled = if stalled.contains(label) { 1.0 } else { 0.0 };
            metrics::gauge!(RELAY_STALLED, "relay" => label.clone()).set(is_stalled);
        }
        self.restarted.retain(|relay, _| now.contains(relay));
        self.since.retain(|relay, _| now.contains(relay));
        self.before = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL_TIMEOUT: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_stalled_relay_is_restarted_again_only_after_a_while() {
        let (mut watchdog, start) = (Watchdog::default(), Instant::now());
        let mut look = |after: Duration, is_stalled: bool| {
            if is_stalled {
                watchdog.stalled("relay", start + after);
            }
            let restarts = is_stalled && watchdog.may_restart("relay", start + after, STALL_TIMEOUT);
            watchdog.report();
            restarts
        };
        assert!(look(Duration::ZERO, true));
        assert!(!look(STALL_TIMEOUT, true));
        assert!(look(2 * STALL_TIMEOUT, true), "the first restart did not help");
        // It made progress in between, so this is another stall.
        assert!(!look(3 * STALL_TIMEOUT, false));
        assert!(look(3 * STALL_TIMEOUT, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_lease_causes_no_fast_restarts() {
        let (mut watchdog, start, second) = (Watchdog::default(), Instant::now(), Duration::from_secs(1));
        let mut restarts = Vec::new();
        for after in 0..100 {
            let now = start + after * second;
            watchdog.stalled("relay", now);
            if watchdog.may_restart("relay", now, 3 * second) {
                restarts.push(after);
            }
            watchdog.report();
        }
        assert_eq!(restarts, [17, 77], "after 20 s without progress, and a minute later");
    }
}

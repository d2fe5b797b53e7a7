use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::bus::PublishError;
use posthaste_core::outbox::OutboxItem;
use posthaste_core::{Backoff, Claim, Claimed, Settled, Settlement, Source, StoreError, Wakeup, lock};
use tokio::time::Instant;

/// The pauses between attempts to reach a bus or registry that is away.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A probe without a result may be lost, for example with its lease. Another one may follow after this time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// Decides whether a channel may claim events now.
///
/// A channel that is paused claims nothing. A channel whose bus or registry is away has an open breaker: it claims nothing
/// either, except for one event from time to time, to find out whether they are back. So an outage changes few rows.
pub(crate) struct Gate {
    state: Mutex<State>,
}

struct State {
    is_paused: bool,
    is_table_down: bool,
    /// Nothing is claimed before.
    start: Instant,
    breaker: Option<Breaker>,
}

struct Breaker {
    reason: String,
    backoff: Backoff,
    /// When the next event may be claimed.
    next_probe: Instant,
}

/// How much may be claimed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Permit {
    All,
    One,
    /// Nothing for this time, or until a wake-up.
    Wait(Option<Duration>),
}

impl Gate {
    /// Nothing is claimed before `start`.
    pub(crate) fn new(is_paused: bool, start: Instant) -> Self {
        Self { state: Mutex::new(State { is_paused, is_table_down: false, start, breaker: None }) }
    }

    /// Returns true if that is a change. The caller wakes the source of a channel that is resumed.
    pub(crate) fn set_paused(&self, is_paused: bool) -> bool {
        std::mem::replace(&mut lock(&self.state).is_paused, is_paused) != is_paused
    }

    /// Nothing is claimed from a table that cannot be reached.
    pub(crate) fn set_table_down(&self, is_down: bool) {
        lock(&self.state).is_table_down = is_down;
    }

    /// Why the breaker is open, if it is.
    pub(crate) fn failure(&self) -> Option<String> {
        lock(&self.state).breaker.as_ref().map(|breaker| breaker.reason.clone())
    }

    /// Records the results of a publish. Returns true if that closed the breaker: the caller wakes the source.
    pub(crate) fn published(&self, results: &[Result<(), PublishError>]) -> bool {
        let mut state = lock(&self.state);
        if results.iter().any(|result| !matches!(result, Err(PublishError::Unavailable(_)))) {
            return state.breaker.take().is_some();
        }
        if let Some(Err(error)) = results.first() {
            let reason = error.to_string();
            let breaker = state.breaker.get_or_insert_with(|| Breaker {
                reason: String::new(),
                backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
                next_probe: Instant::now(),
            });
            breaker.reason = reason;
            breaker.next_probe = Instant::now() + breaker.backoff.next_pause();
        }
        false
    }

    pub(super) fn permit(&self) -> Permit {
        let (mut state, now) = (lock(&self.state), Instant::now());
        if state.is_paused || state.is_table_down {
            return Permit::Wait(None);
        }
        if now < state.start {
            return Permit::Wait(Some(state.start - now));
        }
        match &mut state.breaker {
            None => Permit::All,
            Some(breaker) if now < breaker.next_probe => Permit::Wait(Some(breaker.next_probe - now)),
            Some(breaker) => {
                breaker.next_probe = now + PROBE_TIMEOUT;
                Permit::One
            }
        }
    }

    /// No event waits, so there is nothing to probe with. The breaker opens again if the next event cannot be published.
    fn nothing_waits(&self) {
        lock(&self.state).breaker = None;
    }

    /// The probe found no event that it could publish.
    pub(super) fn probed_nothing(&self) {
        if let Some(breaker) = &mut lock(&self.state).breaker {
            breaker.next_probe = Instant::now();
        }
    }
}

/// The source of a channel behind its gate.
pub(crate) struct Gated {
    pub(crate) source: Arc<dyn Source<Item = OutboxItem>>,
    pub(crate) gate: Arc<Gate>,
}

#[async_trait]
impl Source for Gated {
    type Item = OutboxItem;

    async fn claim(&self, limit: usize) -> Result<Claim<OutboxItem>, StoreError> {
        match self.gate.permit() {
            Permit::All => self.source.claim(limit).await,
            Permit::Wait(next_due) => Ok(Claim { items: Vec::new(), next_due }),
            Permit::One => {
                let claimed = self.source.claim(1).await;
                match &claimed {
                    Ok(claim) if !claim.items.is_empty() => {}
                    // Another process has published what failed here.
                    Ok(claim) if claim.next_due.is_none() => self.gate.nothing_waits(),
                    _ => self.gate.probed_nothing(),
                }
                claimed
            }
        }
    }

    async fn settle(&self, settlements: &[Settlement<'_, OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        self.source.settle(settlements).await
    }

    async fn renew(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<Vec<Settled>, StoreError> {
        self.source.renew(claimed).await
    }

    async fn release(&self, claimed: &[&Claimed<OutboxItem>]) -> Result<(), StoreError> {
        self.source.release(claimed).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.source.close().await
    }

    fn lease(&self) -> Duration {
        self.source.lease()
    }

    fn renews_on_own_thread(&self) -> bool {
        self.source.renews_on_own_thread()
    }

    fn wakeup(&self) -> &Wakeup {
        self.source.wakeup()
    }

    fn may_start(&self, claimed: &Claimed<OutboxItem>) -> bool {
        self.source.may_start(claimed)
    }

    async fn revoked(&self) {
        self.source.revoked().await;
    }
}

#[cfg(test)]
mod tests {
    use posthaste_core::FaultKind;
    use tokio::time::advance;

    use super::*;

    fn away() -> Result<(), PublishError> {
        Err(PublishError::Unavailable(Arc::new(StoreError::new("publish", FaultKind::Transient, "away"))))
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_lets_one_event_through_from_time_to_time() {
        let gate = Gate::new(false, Instant::now());
        assert_eq!(gate.permit(), Permit::All);
        assert!(!gate.published(&[away(), away()]));
        assert!(gate.failure().is_some_and(|reason| reason.contains("away")));
        assert_eq!(gate.permit(), Permit::Wait(Some(FIRST_PAUSE)));
        advance(FIRST_PAUSE).await;
        assert_eq!(gate.permit(), Permit::One);
        assert_eq!(gate.permit(), Permit::Wait(Some(PROBE_TIMEOUT)), "one probe at a time");
        assert!(!gate.published(&[away()]));
        assert_eq!(gate.permit(), Permit::Wait(Some(2 * FIRST_PAUSE)));
        advance(2 * FIRST_PAUSE).await;
        assert_eq!(gate.permit(), Permit::One);
        assert!(gate.published(&[Ok(())]), "it closes");
        assert_eq!((gate.permit(), gate.failure()), (Permit::All, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_probe_is_followed_by_another() {
        let gate = Gate::new(false, Instant::now());
        gate.published(&[away()]);
        advance(FIRST_PAUSE).await;
        assert_eq!(gate.permit(), Permit::One);
        gate.probed_nothing();
        assert_eq!(gate.permit(), Permit::One);
        advance(PROBE_TIMEOUT).await;
        assert_eq!(gate.permit(), Permit::One);
    }

    #[tokio::test(start_paused = true)]
    async fn a_channel_without_events_has_no_failure() {
        let gate = Gate::new(false, Instant::now());
        gate.published(&[away()]);
        gate.nothing_waits();
        assert_eq!((gate.permit(), gate.failure()), (Permit::All, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_event_does_not_open_the_breaker() {
        let gate = Gate::new(false, Instant::now());
        gate.published(&[Err(PublishError::Refused { reason: "too large".to_owned() })]);
        gate.published(&[away(), Ok(())]);
        gate.published(&[]);
        assert_eq!(gate.permit(), Permit::All);
    }

    #[tokio::test(start_paused = true)]
    async fn a_paused_channel_and_a_table_that_is_down_claim_nothing() {
        let gate = Gate::new(true, Instant::now() + Duration::from_secs(1));
        assert_eq!(gate.permit(), Permit::Wait(None));
        assert!(gate.set_paused(false));
        assert!(!gate.set_paused(false));
        assert_eq!(gate.permit(), Permit::Wait(Some(Duration::from_secs(1))), "it starts later");
        advance(Duration::from_secs(1)).await;
        assert_eq!(gate.permit(), Permit::All);
        gate.set_table_down(true);
        assert_eq!(gate.permit(), Permit::Wait(None));
    }
}

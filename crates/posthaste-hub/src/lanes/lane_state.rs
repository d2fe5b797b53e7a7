use std::time::Duration;

use posthaste_core::Load;
use tokio::time::Instant;

/// The longest time for which a fast lane postpones a delivery that exceeds its share, and how much it may postpone.
pub(super) const LONGEST_POSTPONED: Duration = Duration::from_millis(500);
pub(super) const MAX_POSTPONED: Load = Load { items: 1_000, bytes: 4 * 1024 * 1024 };
/// After this many timeouts in a row an endpoint counts as unresponsive.
const MAX_TIMEOUTS: u32 = 3;
/// After this many requests in a row without a response, it counts as unresponsive too, whatever the reasons were. Many
/// of them may be under way at the same time.
const MAX_UNANSWERED: u32 = 20;
/// How long an unresponsive endpoint gets no request: at first, and at most.
const FIRST_HOLD: Duration = Duration::from_secs(1);
pub(super) const LONGEST_HOLD: Duration = Duration::from_secs(120);
/// Each probe without a response makes the next hold longer by this factor.
const HOLD_FACTOR: u32 = 4;
/// A lane may use one part in this many of what is left of the budget.
const PART: usize = 8;

/// What is known about an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It responded to the last request.
    Responsive,
    /// It has not responded yet, or the last request had no response.
    Unproven,
    /// Several requests in a row had no response. It gets one request at a time, with pauses between them.
    Unresponsive,
}

impl Standing {
    /// What the first delivery of a lane may use. The rest is reserved for lanes of a better standing.
    pub(super) fn first(self, budget: Load, all: Load) -> Load {
        let reserved = match self {
            Self::Responsive => Load::default(),
            Self::Unproven => budget.part(8),
            Self::Unresponsive => budget.part(2),
        };
        budget.saturating_sub(all).saturating_sub(reserved)
    }

    /// What a lane may hold. The rest is reserved for other lanes, above all for the first delivery of each.
    pub(super) fn share(self, budget: Load, all: Load) -> Load {
        let reserved = match self {
            Self::Responsive => budget.part(4),
            Self::Unproven => budget.part(2),
            Self::Unresponsive => budget,
        };
        budget.saturating_sub(all).saturating_sub(reserved).part(PART)
    }
}

/// What a lane holds, and what is known about its endpoint.
pub(super) struct LaneState {
    /// The fresh deliveries that were admitted and have not ended.
    pub(super) held: Load,
    /// Requests that are under way: of fresh deliveries, and of dead letters.
    pub(super) fresh_requests: usize,
    pub(super) dead_letter_requests: usize,
    /// The average duration of the last requests, in microseconds; 0 before the first response.
    pub(super) average: u64,
    /// Requests in a row that had no response, and those of them that timed out.
    unanswered: u32,
    timeouts: u32,
    /// The endpoint is unresponsive and gets no request before this time.
    pub(super) hold_until: Option<Instant>,
    /// How long the next hold is.
    hold: Duration,
    /// When the last of the postponed deliveries is expected to be sent.
    postponed_until: Option<Instant>,
}

impl Default for LaneState {
    fn default() -> Self {
        Self {
            held: Load::default(),
            fresh_requests: 0,
            dead_letter_requests: 0,
            average: 0,
            unanswered: 0,
            timeouts: 0,
            hold_until: None,
            hold: FIRST_HOLD,
            postponed_until: None,
        }
    }
}

impl LaneState {
    pub(super) fn standing(&self) -> Standing {
        match self.unanswered {
            _ if self.timeouts >= MAX_TIMEOUTS => Standing::Unresponsive,
            0 if self.average > 0 => Standing::Responsive,
            0..MAX_UNANSWERED => Standing::Unproven,
            MAX_UNANSWERED.. => Standing::Unresponsive,
        }
    }

    pub(super) fn is_unresponsive(&self) -> bool {
        self.standing() == Standing::Unresponsive
    }

    /// The number of requests of fresh deliveries, or of dead letters.
    pub(super) fn requests(&mut self, is_fresh: bool) -> &mut usize {
        if is_fresh { &mut self.fresh_requests } else { &mut self.dead_letter_requests }
    }

    /// A request had no response within its timeout.
    pub(super) fn timed_out(&mut self, took: u64, is_probe: bool) {
        self.timeouts = self.timeouts.saturating_add(1);
        if self.average > 0 {
            self.average_in(took);
        }
        self.unanswered(is_probe);
    }

    /// A request had no response. If it was a probe, or the first that shows that the endpoint is unresponsive, the
    /// endpoint gets no request for a while.
    pub(super) fn unanswered(&mut self, is_probe: bool) {
        self.unanswered = self.unanswered.saturating_add(1);
        if self.is_unresponsive() && (is_probe || self.hold_until.is_none()) {
            self.hold_until = Some(Instant::now() + self.hold);
            self.hold = (self.hold * HOLD_FACTOR).min(LONGEST_HOLD);
        }
    }

    /// The endpoint responded, whatever it said.
    pub(super) fn responded(&mut self, took: u64) {
        self.unanswered = 0;
        self.timeouts = 0;
        self.hold = FIRST_HOLD;
        self.hold_until = None;
        self.average_in(took);
    }

    /// A moving average over about eight requests.
    fn average_in(&mut self, took: u64) {
        self.average = if self.average == 0 { took } else { self.average - self.average / 8 + took / 8 };
    }

    /// How long the endpoint gets no request from now on.
    pub(super) fn held_for(&self) -> Option<Duration> {
        let hold_until = self.hold_until?;
        Some(hold_until.saturating_duration_since(Instant::now())).filter(|hold| !hold.is_zero())
    }

    pub(super) fn has_requests(&self) -> bool {
        self.fresh_requests + self.dead_letter_requests > 0
    }

    pub(super) fn expected_wait(&self, width: usize) -> Duration {
        if self.fresh_requests < width {
            return Duration::ZERO;
        }
        let waiting = (self.held.items - self.fresh_requests) as u64 + 1;
        Duration::from_micros(self.average.saturating_mul(waiting) / width as u64)
    }

    /// How long to postpone a delivery of this size that exceeds the share; `None` if the lane is too slow, or has
    /// postponed too much.
    pub(super) fn postpone(&mut self, width: usize, bytes: usize, now: Instant) -> Option<Duration> {
        if self.standing() != Standing::Responsive {
            return None;
        }
        let one = Duration::from_micros(self.average) / width as u32;
        let after_held = now + self.expected_wait(width).max(Duration::from_micros(self.average));
        let next = self.postponed_until.unwrap_or(now).max(after_held) + one;
        let (wait, postponed) = (next - now, (next - after_held).div_duration_f64(one) as usize);
        let most = MAX_POSTPONED.items.min(MAX_POSTPONED.bytes / bytes.max(1)).max(1);
        if wait > LONGEST_POSTPONED || postponed > most {
            return None;
        }
        self.postponed_until = Some(next);
        Some(wait)
    }
}

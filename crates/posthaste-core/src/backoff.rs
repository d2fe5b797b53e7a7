use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::millis;

/// How long to wait before the next attempt, and when to give up. Data, so that a config file can spell it; there all
/// times are milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RetryPolicy {
    /// `min(max, base * 2^(n-1))`, spread by a factor in `[0.5, 1.5)` and capped at `max` again.
    Exponential {
        /// The delay after the first failure.
        #[serde(with = "millis")]
        base: Duration,
        /// The longest delay.
        #[serde(with = "millis")]
        max: Duration,
        /// `None`: never given up.
        max_attempts: Option<u32>,
    },
    /// The same delay each time, without spread.
    Fixed {
        /// The delay after each failure.
        #[serde(with = "millis")]
        interval: Duration,
        /// `None`: never given up.
        max_attempts: Option<u32>,
    },
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::Exponential { base: Duration::from_millis(200), max: Duration::from_secs(60), max_attempts: Some(10) }
    }
}

impl RetryPolicy {
    /// Retries without a limit: for faults of the pipeline itself.
    pub fn forever() -> Self {
        Self::Exponential { base: Duration::from_millis(50), max: Duration::from_secs(5), max_attempts: None }
    }

    /// How many attempts there are; `None` if there is no limit.
    pub fn max_attempts(&self) -> Option<u32> {
        match self {
            Self::Exponential { max_attempts, .. } | Self::Fixed { max_attempts, .. } => *max_attempts,
        }
    }

    /// The delay after failed attempt number `attempt` (from 1). `jitter` is in `[0, 1)`.
    pub fn delay(&self, attempt: u32, jitter: f64) -> Duration {
        match self {
            Self::Fixed { interval, .. } => *interval,
            Self::Exponential { .. } if attempt == 0 => Duration::ZERO,
            Self::Exponential { base, max, .. } => {
                let seconds = doubled(*base, *max, attempt - 1).as_secs_f64() * (0.5 + jitter);
                // Fails if a delay is too long for its type, as with a `max` of `Duration::MAX`.
                Duration::try_from_secs_f64(seconds).map_or(*max, |spread| spread.min(*max))
            }
        }
    }
}

/// The pauses between the attempts of an operation that fails: each is twice as long as the last, up to a limit.
///
/// This is for faults of the infrastructure: a store that does not respond, a task that panicked. A failed *item* is
/// retried by its [`RetryPolicy`](crate::RetryPolicy), which doubles in the same way and adds jitter.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// Pauses from `first` to `longest`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// The pause after one more failure.
    pub fn next_pause(&mut self) -> Duration {
        let pause = doubled(self.first, self.longest, self.failures);
        self.failures = self.failures.saturating_add(1);
        pause
    }

    /// Makes the next pause the first one again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

/// `first * 2^doublings`, but at most `longest`.
pub(crate) fn doubled(first: Duration, longest: Duration, doublings: u32) -> Duration {
    let nanos = first.as_nanos().saturating_mul(1 << doublings.min(63)).min(longest.as_nanos());
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_start_again_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(100));
        let pauses: Vec<u128> = (0..5).map(|_| backoff.next_pause().as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100, 100]);
        backoff.reset();
        assert_eq!(backoff.next_pause(), Duration::from_millis(20));
        assert_eq!(doubled(Duration::MAX, Duration::from_secs(1), u32::MAX), Duration::from_secs(1));
    }
}

use std::time::Duration;

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

use crate::{Disposition, FailureClass, Outcome, RetryPolicy};

/// Decides what follows from an outcome. Pure: randomness is a parameter, `jitter` in `[0, 1)`.
///
/// `attempt` is the number of the attempt that has just ended, counted from 1. `budget` is the item's own limit, which
/// replaces the policy's.
pub fn decide(policy: &RetryPolicy, attempt: u32, budget: Option<u32>, outcome: Outcome, jitter: f64) -> Disposition {
    let failure = match outcome {
        Outcome::Delivered => return Disposition::Done,
        Outcome::Snoozed { wait } => return Disposition::Retry { after: wait, counted: false, failure: None },
        Outcome::Failed(failure) => failure,
    };
    let after = failure.retry_after.unwrap_or_else(|| policy.delay(attempt, jitter));
    match failure.class {
        FailureClass::Permanent => Disposition::Dead(failure),
        FailureClass::Outage => Disposition::Retry { after, counted: false, failure: Some(failure) },
        FailureClass::Transient => match budget.or(policy.max_attempts()) {
            Some(max) if attempt >= max => Disposition::Dead(failure),
            _ => Disposition::Retry { after, counted: true, failure: Some(failure) },
        },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Failure;
    use proptest::prelude::*;

    fn transient() -> Outcome {
        Outcome::Failed(Failure::transient("503", "down"))
    }

    #[test]
    fn delivered_is_done_and_a_snooze_is_not_counted() {
        let policy = RetryPolicy::default();
        assert_eq!(decide(&policy, 10, None, Outcome::Delivered, 0.5), Disposition::Done);
        let wait = Duration::from_secs(30);
        assert_eq!(
            decide(&policy, 10, None, Outcome::Snoozed { wait }, 0.5),
            Disposition::Retry { after: wait, counted: false, failure: None }
        );
    }

    #[test]
    fn an_item_is_dead_after_the_last_attempt_of_its_budget() {
        let policy = RetryPolicy::default();
        let counted = |attempt, budget| {
            matches!(decide(&policy, attempt, budget, transient(), 0.0), Disposition::Retry { counted: true, .. })
        };
        assert!(counted(9, None));
        assert!(!counted(10, None));
        assert!(counted(1, Some(2)));
        assert!(!counted(2, Some(2)));
        assert!(!counted(1, Some(1)));
    }

    #[test]
    fn an_outage_is_never_counted_and_a_permanent_failure_is_dead_at_once() {
        let policy = RetryPolicy::default();
        let outage = Outcome::Failed(Failure::outage("broker", "gone"));
        assert!(matches!(
            decide(&policy, 1_000, None, outage, 0.0),
            Disposition::Retry { counted: false, failure: Some(_), .. }
        ));
        let permanent = Outcome::Failed(Failure::permanent("410", "gone"));
        assert!(matches!(decide(&policy, 1, None, permanent, 0.0), Disposition::Dead(_)));
    }

    #[test]
    fn retry_after_replaces_the_delay_of_the_policy() {
        let asked = Outcome::Failed(Failure::transient("429", "slow down").retry_after(Duration::from_secs(300)));
        let Disposition::Retry { after, counted, .. } = decide(&RetryPolicy::default(), 1, None, asked, 0.9) else {
            panic!("a retry");
        };
        assert_eq!((after, counted), (Duration::from_secs(300), true));
    }

    #[test]
    fn backoff_doubles_to_its_maximum() {
        let policy = RetryPolicy::default();
        assert_eq!(policy.delay(0, 0.5), Duration::ZERO);
        assert_eq!(policy.delay(1, 0.5), Duration::from_millis(200));
        assert_eq!(policy.delay(2, 0.5), Duration::from_millis(400));
        assert_eq!(policy.delay(1, 0.0), Duration::from_millis(100));
        for attempt in [31, 32, 50, 100, u32::MAX] {
            assert_eq!(policy.delay(attempt, 0.5), Duration::from_secs(60));
        }
    }

    proptest! {
        #[test]
        fn backoff_is_never_above_its_maximum(attempt: u32, jitter in 0.0..1.0, base in 1u64..100_000, max in 1u64..100_000) {
            let policy = RetryPolicy::Exponential {
                base: Duration::from_millis(base),
                max: Duration::from_millis(max),
                max_attempts: None,
            };
            prop_assert!(policy.delay(attempt, jitter) <= Duration::from_millis(max));
        }

        #[test]
        fn no_budget_means_never_dead(attempt: u32, jitter in 0.0..1.0) {
            let never_dead = matches!(
                decide(&RetryPolicy::forever(), attempt, None, transient(), jitter),
                Disposition::Retry { .. }
            );
            prop_assert!(never_dead);
        }
    }
}

use std::time::Duration;

use super::{DeadLetter, DeadLetterClaimId, DeadLetterStatus, Trigger};
use crate::{Disposition, Failure, Settlement};

/// The changes that an attempt makes to its dead letter. The store applies them and decides nothing itself.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetterUpdate {
    /// The dead letter.
    pub id: String,
    /// The claim that must still have the lease.
    pub claim_id: DeadLetterClaimId,
    /// Why the attempt was made.
    pub trigger: Trigger,
    /// The new status; `None` leaves it as it is.
    pub status: Option<DeadLetterStatus>,
    /// True if a request was made. It counts as an attempt, changes `updated_at` and adds an entry to the history.
    pub is_attempt: bool,
    /// True if it also counts as a scheduled retry.
    pub is_scheduled_retry: bool,
    /// True if the entry in the history is the result of the replay that the dead letter waits for, if it waits for
    /// one.
    pub answers_replay: bool,
    /// The change of the schedule.
    pub schedule: DueChange,
    /// The change of the replay.
    pub replay: DueChange,
    /// Why the attempt failed. If present, it replaces the error of the dead letter.
    pub failure: Option<Failure>,
    /// How long the attempt took.
    pub took: Duration,
}

/// The change of one of the two due times of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DueChange {
    /// Unchanged.
    Keep,
    /// Cleared.
    Clear,
    /// Due after this time, from `now`.
    After(Duration),
}

impl DeadLetterUpdate {
    /// The update for this settlement.
    ///
    /// A failure moves or clears the due time that made the dead letter due, and leaves the other one unchanged. A
    /// success clears both, so a scheduled success also completes a replay that an operator requested meanwhile.
    pub fn of(settlement: &Settlement<'_, DeadLetter>) -> Self {
        let letter = &settlement.claimed.item;
        let is_scheduled = letter.trigger == Trigger::Scheduled;
        let is_done = *settlement.disposition == Disposition::Done;
        let triggering = |change| if is_scheduled { (change, DueChange::Keep) } else { (DueChange::Keep, change) };
        let (status, is_attempt, (schedule, replay)) = match settlement.disposition {
            Disposition::Done => (Some(DeadLetterStatus::Processed), true, (DueChange::Clear, DueChange::Clear)),
            Disposition::Retry { after, counted: true, .. } => {
                (Some(DeadLetterStatus::Failed), true, triggering(DueChange::After(*after)))
            }
            Disposition::Retry { after, counted: false, .. } => (None, false, triggering(DueChange::After(*after))),
            Disposition::Dead(_) => (Some(DeadLetterStatus::Failed), true, triggering(DueChange::Clear)),
        };
        Self {
            id: letter.id.clone(),
            claim_id: letter.claim_id.clone(),
            trigger: letter.trigger.clone(),
            status,
            is_attempt,
            is_scheduled_retry: is_attempt && is_scheduled,
            answers_replay: !is_scheduled || is_done,
            schedule,
            replay,
            failure: failure_of(settlement.disposition).cloned(),
            took: settlement.took,
        }
    }
}

/// The failure of the attempt; `None` if it succeeded or if no request was made.
fn failure_of(disposition: &Disposition) -> Option<&Failure> {
    match disposition {
        Disposition::Retry { counted: true, failure, .. } => failure.as_ref(),
        Disposition::Dead(failure) => Some(failure),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::dead_letter_source::tests::letter;
    use super::*;
    use crate::Claimed;

    fn update(trigger: Trigger, disposition: Disposition) -> DeadLetterUpdate {
        let claimed = Claimed::new(DeadLetter { trigger, ..letter("1") }, 1, 0);
        let took = Duration::from_millis(12);
        DeadLetterUpdate::of(&Settlement { claimed: &claimed, disposition: &disposition, took })
    }

    #[test]
    fn a_failure_changes_only_the_due_time_that_made_the_dead_letter_due() {
        let replay = || Trigger::Replay { replay_id: "r".to_owned() };
        let failure = Failure::transient("500", "broken");
        let wait = Duration::from_secs(3);
        let retry = |counted| Disposition::Retry { after: wait, counted, failure: Some(failure.clone()) };

        let counted = update(Trigger::Scheduled, retry(true));
        assert_eq!((counted.schedule, counted.replay), (DueChange::After(wait), DueChange::Keep));
        assert!(counted.is_attempt && counted.is_scheduled_retry && !counted.answers_replay);
        let uncounted = update(replay(), retry(false));
        assert_eq!((uncounted.schedule, uncounted.replay), (DueChange::Keep, DueChange::After(wait)));
        assert_eq!((uncounted.status, uncounted.is_attempt, uncounted.failure), (None, false, None));
        let dead = update(replay(), Disposition::Dead(failure.clone()));
        assert_eq!((dead.schedule, dead.replay), (DueChange::Keep, DueChange::Clear));
        assert!(dead.is_attempt && !dead.is_scheduled_retry && dead.answers_replay);
        let done = update(Trigger::Scheduled, Disposition::Done);
        assert_eq!((done.schedule, done.replay), (DueChange::Clear, DueChange::Clear));
        assert!(done.answers_replay && done.is_scheduled_retry);
    }
}

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};

use super::{DeadLetterFilter, DeadLetterPage, DeadLetterUpdate};
use crate::{ClaimToken, Settled, StoreError};

/// The table of dead letters: deliveries whose immediate attempts are spent.
///
/// A dead letter has two due times: its *schedule* (automatic retries) and its *replay* (requested by an operator). It
/// is *due* when the earlier of them has come. `now` is the database's own clock, read inside the statement.
///
/// # Laws
///
/// Each is a test of that name in `posthaste-backend-tests` (`hub_laws`). A
/// [`DeadLetterSource`](super::DeadLetterSource) on the store also passes the laws of [`Source`](crate::Source).
///
/// - `each_subscription_is_claimed_by_itself`: however many dead letters one subscription has, those of the others are
///   found and claimed.
/// - `a_delivery_is_inserted_once`: inserting the same delivery id again changes nothing. Each dead letter gets a UUID
///   as its id, and ids rise in the order of insertion.
/// - `a_permanent_failure_is_inserted_as_failed`, with no retry scheduled, and can be replayed.
/// - `scheduled_retries_count_and_leave_a_history`: an attempt that was made adds one entry to the history, in the
///   transaction that settles it. An attempt that was not made leaves no trace.
/// - `a_replay_is_one_attempt_beside_the_schedule`: a replay does not change the schedule. Dead letters that were
///   delivered, or that already wait for a replay, are not replayed.
/// - `a_scheduled_success_completes_a_replay_requested_meanwhile`.
/// - `closing_releases_the_claims_of_this_owner_only`.
/// - `a_settlement_of_an_earlier_claim_changes_nothing`: settle, renew and release are fenced by the claim id.
/// - `schedules_end_where_the_limit_was_lowered`: dead letters for which no request was ever made keep their schedule.
/// - `lists_are_filtered_and_sorted`, `a_cursor_continues_where_the_page_ended`.
/// - `processed_dead_letters_are_removed_with_their_history`, and no others.
///
/// A row that cannot be read MUST NOT keep others from being claimed or listed. A claim that reads such a row reports
/// it, makes it FAILED with the error code `unreadable`, and clears both of its due times.
#[async_trait]
pub trait DeadLetterStore: DeadLetterReplays + DeadLetterQueries + Send + Sync + 'static {
    /// Inserts dead letters, each delivery once, and schedules their first retries. Durable when it returns.
    async fn insert(&self, letters: Vec<NewDeadLetter>) -> Result<(), StoreError>;

    /// The subscriptions that have dead letters with a due time that are not leased and not in `in_flight`. It reads
    /// one dead letter per subscription, however many there are, and writes nothing.
    async fn waiting(&self, in_flight: Vec<String>) -> Result<Vec<WaitingSubscription>, StoreError>;

    /// Leases due dead letters of the subscriptions of the request that are not leased and not in `in_flight`: of each
    /// subscription the earliest, and those with equal due times in the order of insertion.
    async fn claim(&self, request: DeadLetterClaimRequest) -> Result<Vec<DeadLetter>, StoreError>;

    /// Applies the updates of dead letters that are still leased by the claims of the updates, all in one transaction.
    /// Returns the results in the same order. If a dead letter occurs twice, the first update settles it.
    async fn settle(&self, updates: Vec<DeadLetterUpdate>) -> Result<Vec<Settled>, StoreError>;

    /// Renews the leases of dead letters that these claims still have. Returns the results in the same order.
    async fn renew(
        &self,
        claims: Vec<(String, DeadLetterClaimId)>,
        lease: Duration,
    ) -> Result<Vec<Settled>, StoreError>;

    /// Ends the leases of dead letters that these claims still have.
    async fn release(&self, claims: Vec<(String, DeadLetterClaimId)>) -> Result<(), StoreError>;

    /// Ends all leases of this owner.
    async fn release_all(&self, owner: &str) -> Result<(), StoreError>;

    /// Clears the schedule of dead letters that already had `max_retry` scheduled retries. A dead letter that was
    /// deferred keeps its schedule for one attempt, which is not a retry. Called at a start, whose limit may be lower than
    /// before.
    async fn end_schedules(&self, max_retry: u32) -> Result<(), StoreError>;

    /// Removes the dead letters that were delivered longer than this ago, with their payloads and histories: the oldest
    /// first, at most `limit`. Returns how many; 0 if there are none left. Those that another process is removing are
    /// left to it.
    async fn remove_processed(&self, older_than: Duration, limit: usize) -> Result<u64, StoreError>;
}

/// Replays: deliveries that an operator requests.
#[async_trait]
pub trait DeadLetterReplays {
    /// Makes these dead letters due now, except those that were delivered or already wait for a replay.
    async fn replay(&self, ids: Vec<String>, reason: Option<String>) -> Result<Replay, StoreError>;

    /// The results of a replay so far; empty for an unknown replay. A dead letter that is settled meanwhile is either
    /// pending or has a result.
    async fn replay_results(&self, replay_id: &str) -> Result<ReplayResults, StoreError>;
}

/// Queries of operators, metrics and readiness.
#[async_trait]
pub trait DeadLetterQueries {
    /// One page of the dead letters that meet the filter.
    async fn list(&self, filter: &DeadLetterFilter) -> Result<DeadLetterPage, StoreError>;

    /// One dead letter with its history.
    async fn get(&self, id: &str) -> Result<Option<DeadLetterDetail>, StoreError>;

    /// The dead letters of one event, oldest first.
    async fn of_event(&self, event_id: &str) -> Result<Vec<DeadLetterRow>, StoreError>;

    /// True if a dead letter is due and not leased.
    async fn is_due(&self) -> Result<bool, StoreError>;

    /// How long the dead letter with the earliest due time has been due.
    async fn oldest_due(&self) -> Result<Option<Duration>, StoreError>;

    /// How many dead letters there are of each status.
    async fn depth_by_status(&self) -> Result<Vec<(DeadLetterStatus, u64)>, StoreError>;
}

/// The fields of a dead letter that every view shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterFields {
    /// The delivery that failed.
    pub delivery_id: String,
    /// The event of the delivery.
    pub event_id: String,
    /// The subscription that it goes to.
    pub subscription_id: String,
    /// The subscriber of that subscription.
    pub subscriber_id: String,
    /// The type of the event.
    pub event_type: String,
    /// The domain whose dead-letter topic it came from.
    pub domain: String,
    /// The address that it goes to.
    pub endpoint: String,
    /// How many requests were ever made for it.
    pub attempts: u32,
    /// When the first request failed.
    pub first_failed_at: DateTime<Utc>,
}

/// A dead letter that is to be inserted.
#[derive(Clone, Debug)]
pub struct NewDeadLetter {
    /// The delivery.
    pub fields: DeadLetterFields,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// The OutboxEvent as JSON, for people and for the search.
    pub readable: String,
    /// Why the last request failed.
    pub error: String,
    /// The code of the error.
    pub error_code: String,
    /// The cause of the error.
    pub error_cause: Option<String>,
    /// The delivery was deferred: its first scheduled attempt is not a retry.
    pub is_deferred: bool,
    /// No attempt can succeed. It is FAILED from the start, and waits for an operator.
    pub is_permanent: bool,
    /// How long until the first scheduled retry; `None` if there is none.
    pub first_delay: Option<Duration>,
}

impl NewDeadLetter {
    /// The status in which it is inserted.
    pub fn status(&self) -> DeadLetterStatus {
        if self.is_permanent { DeadLetterStatus::Failed } else { DeadLetterStatus::New }
    }
}

/// Which dead letters to claim.
#[derive(Clone, Debug)]
pub struct DeadLetterClaimRequest {
    /// The new claim.
    pub claim_id: DeadLetterClaimId,
    /// How long the dead letters are leased.
    pub lease: Duration,
    /// The ids of the dead letters that this process has in flight. They are not claimed again, even if their leases
    /// ended.
    pub in_flight: Vec<String>,
    /// The subscriptions, and how many dead letters to claim of each.
    pub subscriptions: Vec<(String, usize)>,
}

/// A subscription with dead letters that wait for a retry or a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingSubscription {
    /// The subscription.
    pub subscription_id: String,
    /// How long until its earliest dead letter is due; zero if it is due now.
    pub due_in: Duration,
}

/// A claim of dead letters: no two claims ever have the same id. It is the fencing token in the table, as text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeadLetterClaimId {
    /// The process that claims.
    pub owner: Arc<str>,
    /// The number of the claim in that process.
    pub number: u64,
}

impl DeadLetterClaimId {
    pub(super) fn token(&self) -> ClaimToken {
        ClaimToken { number: self.number, generation: 0 }
    }
}

impl fmt::Display for DeadLetterClaimId {
    /// `owner:number`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.owner, self.number)
    }
}

/// A claimed dead letter.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// Its id.
    pub id: String,
    /// The delivery.
    pub fields: DeadLetterFields,
    /// Why it is retried now.
    pub trigger: Trigger,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// How many of the attempts were scheduled retries.
    pub retry_count: u32,
    /// The claim that has leased it.
    pub claim_id: DeadLetterClaimId,
}

/// Why a dead letter is tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// A scheduled retry is due.
    Scheduled,
    /// An operator requested a replay.
    Replay {
        /// The replay.
        replay_id: String,
    },
}

/// The state of a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeadLetterStatus {
    /// Not retried since it was inserted.
    New,
    /// Delivered by a retry or a replay.
    Processed,
    /// Retried, and the retry failed; or no retry can succeed.
    Failed,
}

impl DeadLetterStatus {
    /// The number in the column `status`.
    pub fn code(self) -> i16 {
        match self {
            Self::New => 0,
            Self::Processed => 1,
            Self::Failed => 2,
        }
    }

    /// The status of a number in the column `status`.
    pub fn of_code(code: i64) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Processed,
            _ => Self::Failed,
        }
    }
}

/// A dead letter as a list shows it.
#[derive(Clone, Debug)]
pub struct DeadLetterRow {
    /// Its id.
    pub id: String,
    /// The delivery.
    pub fields: DeadLetterFields,
    /// Its state.
    pub status: DeadLetterStatus,
    /// How many of the attempts were scheduled retries.
    pub retry_count: u32,
    /// Why the last request failed.
    pub error: String,
    /// The code of the error.
    pub error_code: String,
    /// The cause of the error.
    pub error_cause: Option<String>,
    /// When the next scheduled retry is due.
    pub scheduled_at: Option<DateTime<Utc>>,
    /// The replay that it waits for.
    pub replay_id: Option<String>,
    /// When it was inserted.
    pub created_at: DateTime<Utc>,
    /// When it last changed.
    pub updated_at: DateTime<Utc>,
}

/// One dead letter with its history.
#[derive(Clone, Debug)]
pub struct DeadLetterDetail {
    /// The fields that a list shows.
    pub row: DeadLetterRow,
    /// The OutboxEvent in Protobuf.
    pub envelope: Bytes,
    /// The OutboxEvent as JSON.
    pub readable: String,
    /// Its scheduled and replayed attempts, oldest first.
    pub history: Vec<DeadLetterHistory>,
}

/// One scheduled or replayed attempt.
#[derive(Clone, Debug)]
pub struct DeadLetterHistory {
    /// The code of the error; `None` if the attempt succeeded.
    pub error_code: Option<String>,
    /// Why it failed.
    pub error_message: Option<String>,
    /// The cause of the failure.
    pub error_cause: Option<String>,
    /// When it ended.
    pub process_date: DateTime<Utc>,
    /// Why it was made.
    pub trigger: Trigger,
    /// How long it took.
    pub duration: Duration,
}

/// A request to deliver dead letters again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// Its id, a UUID.
    pub id: String,
    /// How many dead letters are replayed.
    pub matched: u64,
}

/// The results of a replay so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplayResults {
    /// How many dead letters were not retried yet.
    pub pending: usize,
    /// One result for each dead letter that was retried.
    pub results: Vec<ReplayResult>,
}

/// The result of a replay for one dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayResult {
    /// The dead letter.
    pub dead_letter_id: String,
    /// Processed or failed.
    pub status: DeadLetterStatus,
    /// Why it failed.
    pub error_code: Option<String>,
}

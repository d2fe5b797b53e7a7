use std::time::Duration;

use chrono::{DateTime, Utc};
use posthaste_api::proto::{self, OutboxEvent};
use posthaste_api::{
    DeadLetter, DeadLetterDetail, DeadLetterPage, DeadLetterStatus, Domain, FailureSummary, ReplayOut, ReplayResult,
    RetryAttempt, Trigger,
};
use posthaste_core::hub_store::{self, DeadLetterFilter, DeadLetterHistory, DeadLetterRow};
use posthaste_core::{FaultKind, StoreError};
use prost::Message;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::Hub;

/// How often the results of a replay are read while a caller waits for them.
const REPLAY_POLL: Duration = Duration::from_millis(100);

impl Hub {
    /// One page of the dead letters that meet the filter.
    pub async fn dead_letters(&self, filter: &DeadLetterFilter) -> Result<DeadLetterPage, StoreError> {
        let page = self.stores.dead_letters.list(filter).await?;
        Ok(DeadLetterPage {
            items: page.items.into_iter().map(shown).collect(),
            page: filter.page,
            size: filter.size,
            total: page.total,
            total_is_lower_bound: page.total_is_lower_bound,
            next_cursor: page.next.map(|next| next.to_string()),
        })
    }

    /// One dead letter with its history.
    pub async fn dead_letter(&self, id: Uuid) -> Result<Option<DeadLetterDetail>, StoreError> {
        let Some(detail) = self.stores.dead_letters.get(&id.to_string()).await? else {
            return Ok(None);
        };
        let failure = OutboxEvent::decode(detail.envelope).ok().and_then(|message| message.failure).map(summary);
        let event = RawValue::from_string(detail.readable).or_else(|_| RawValue::from_string("null".to_owned()));
        let event = event.map_err(|error| StoreError::new("read a dead letter", FaultKind::Permanent, error))?;
        let history = detail.history.into_iter().map(attempt).collect();
        Ok(Some(DeadLetterDetail { letter: shown(detail.row), event, failure, history }))
    }

    /// Replays dead letters. With `wait`, returns the results when all are known or the time is over.
    pub async fn replay(
        &self,
        ids: &[Uuid],
        reason: Option<String>,
        wait: Option<Duration>,
    ) -> Result<ReplayOut, StoreError> {
        let ids = ids.iter().map(Uuid::to_string).collect();
        let replay = self.dead_letters.replay(ids, reason).await?;
        let mut answer = ReplayOut { replay_id: Some(parsed(&replay.id)), matched: replay.matched, results: None };
        if let Some(wait) = wait {
            let end = Instant::now() + wait;
            loop {
                let results = self.stores.dead_letters.replay_results(&replay.id).await?;
                if results.pending == 0 || Instant::now() >= end {
                    answer.results = Some(results.results.into_iter().map(result).collect());
                    break;
                }
                sleep(REPLAY_POLL).await;
            }
        }
        Ok(answer)
    }

    /// How many dead letters there are of each status.
    pub async fn dead_letter_depth(&self) -> Result<Vec<(DeadLetterStatus, u64)>, StoreError> {
        let depth = self.stores.dead_letters.depth_by_status().await?;
        Ok(depth.into_iter().map(|(stored, count)| (status(stored), count)).collect())
    }
}

pub(crate) fn shown(row: DeadLetterRow) -> DeadLetter {
    DeadLetter {
        id: parsed(&row.id),
        message_id: row.fields.event_id,
        subscription_id: parsed(&row.fields.subscription_id),
        subscriber_id: row.fields.subscriber_id,
        event_type: row.fields.event_type,
        domain: row.fields.domain.parse().unwrap_or(Domain::Organization),
        endpoint: row.fields.endpoint,
        status: status(row.status),
        retry_count: row.retry_count,
        error: Some(row.error),
        error_code: Some(row.error_code),
        created_at: row.created_at,
        updated_at: row.updated_at,
    }
}

fn status(status: hub_store::DeadLetterStatus) -> DeadLetterStatus {
    match status {
        hub_store::DeadLetterStatus::New => DeadLetterStatus::New,
        hub_store::DeadLetterStatus::Processed => DeadLetterStatus::Processed,
        hub_store::DeadLetterStatus::Failed => DeadLetterStatus::Failed,
    }
}

fn summary(failure: proto::Failure) -> FailureSummary {
    let time = |timestamp: Option<prost_types::Timestamp>| -> Option<DateTime<Utc>> { proto::datetime(&timestamp?) };
    FailureSummary {
        code: failure.code,
        message: failure.message,
        cause: failure.cause,
        attempts: failure.attempts,
        first_failed_at: time(failure.first_failed_at),
        last_failed_at: time(failure.last_failed_at),
    }
}

fn attempt(row: DeadLetterHistory) -> RetryAttempt {
    RetryAttempt {
        error_code: row.error_code,
        error_message: row.error_message,
        error_cause: row.error_cause,
        process_date: row.process_date,
        trigger: match row.trigger {
            hub_store::Trigger::Scheduled => Trigger::Scheduled,
            hub_store::Trigger::Replay { .. } => Trigger::Replay,
        },
        duration_ms: u64::try_from(row.duration.as_millis()).unwrap_or(u64::MAX),
    }
}

fn result(result: hub_store::ReplayResult) -> ReplayResult {
    ReplayResult { id: parsed(&result.dead_letter_id), status: status(result.status), error_code: result.error_code }
}

fn parsed(id: &str) -> Uuid {
    Uuid::parse_str(id).unwrap_or_default()
}

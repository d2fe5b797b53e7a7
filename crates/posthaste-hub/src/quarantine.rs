//! Quarantined records: what operators see of them, their replay and their discard.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use posthaste_api::{
    Base64, Headers, QuarantineAction, QuarantinePage, QuarantineResult, QuarantineResults, QuarantineSelection,
    QuarantineStatus, QuarantinedDetail, QuarantinedRecord,
};
use posthaste_core::bus::{Bus, PublishError, Record};
use posthaste_core::hub_store::{self, QuarantineCursor, QuarantineFilter, QuarantineStore, QuarantinedRow};
use posthaste_core::metric_names::{QUARANTINE_DISCARDED, QUARANTINE_REPLAYED};
use posthaste_core::{FaultKind, StoreError};
use uuid::Uuid;

use crate::Hub;

/// How long a replay may take to publish the records that it has claimed. Longer than any bus takes to accept or refuse
/// them.
const LEASE: Duration = Duration::from_mins(2);
/// How many records are claimed and published at once. Each may have two mebibytes.
const AT_ONCE: usize = 20;
/// How many records that meet a filter one call replays or discards.
const MATCHED_AT_ONCE: u32 = 500;

impl Hub {
    /// One page of the quarantined records that meet the filter, newest first.
    pub async fn quarantine(
        &self,
        filter: &QuarantineFilter,
        after: Option<&QuarantineCursor>,
        size: u32,
    ) -> Result<QuarantinePage, StoreError> {
        let page = self.stores.quarantine.list(filter, after, size).await?;
        Ok(QuarantinePage {
            items: page.items.into_iter().map(shown).collect(),
            size,
            total: page.total,
            total_is_lower_bound: page.total_is_lower_bound,
            next_cursor: page.next.map(|next| next.to_string()),
        })
    }

    /// One quarantined record with its value.
    pub async fn quarantined(&self, id: Uuid) -> Result<Option<QuarantinedDetail>, StoreError> {
        let found = self.stores.quarantine.get(&id.to_string()).await?;
        Ok(found.map(|found| QuarantinedDetail {
            record: shown(found.row),
            headers: Headers(found.headers),
            value_base64: Base64(found.value),
        }))
    }

    /// Publishes quarantined records to their topics again, with the same key, headers and partition, and marks each as
    /// replayed once it is durable. Records of one partition keep their order within a call. All groups that read the
    /// topic get the records again.
    ///
    /// A process that crashes after a record is durable and before it is marked publishes it again at the next replay.
    pub async fn replay_quarantined(&self, action: &QuarantineAction) -> Result<QuarantineResults, StoreError> {
        let (ids, next_cursor) = self.select(&action.selection).await?;
        let replay = Replay {
            store: self.stores.quarantine.clone(),
            bus: self.stores.bus.clone(),
            claim_id: Uuid::now_v7().to_string(),
            reason: action.reason.clone(),
        };
        // In a task of its own: a caller who hangs up must not end it between the publish and the mark.
        let replay = tokio::spawn(async move { replay.run(ids).await }).await;
        let results = replay
            .unwrap_or_else(|error| Err(StoreError::new("replay quarantined records", FaultKind::Permanent, error)))?;
        Ok(QuarantineResults { results, next_cursor })
    }

    /// Marks quarantined records as not needed. They stay in the table.
    pub async fn discard_quarantined(&self, action: &QuarantineAction) -> Result<QuarantineResults, StoreError> {
        let (ids, next_cursor) = self.select(&action.selection).await?;
        let store = &self.stores.quarantine;
        let discarded: HashSet<String> = store.discard(&ids, &action.reason).await?.into_iter().collect();
        let rows = store.rows(&ids).await?;
        for row in rows.iter().filter(|row| discarded.contains(&row.id)) {
            let QuarantinedRow { id, group, topic, partition, offset, .. } = row;
            let reason = &action.reason;
            tracing::warn!(id, group, topic, partition, offset, reason, "an operator discarded a quarantined record");
            metrics::counter!(QUARANTINE_DISCARDED, "group" => group.clone()).increment(1);
        }
        let explain = |row: &QuarantinedRow| match discarded.contains(&row.id) {
            true => None,
            false => Some(unchanged(row)),
        };
        Ok(QuarantineResults { results: results(&ids, &rows, explain), next_cursor })
    }

    /// The ids of the selected records, and the cursor if there are more of them.
    async fn select(&self, selection: &QuarantineSelection) -> Result<(Vec<String>, Option<String>), StoreError> {
        match selection {
            QuarantineSelection::Ids(ids) => {
                let mut seen = HashSet::new();
                let ids = ids.iter().filter(|id| seen.insert(**id)).map(Uuid::to_string);
                Ok((ids.collect(), None))
            }
            QuarantineSelection::Matching { filter, after } => {
                let page = self.stores.quarantine.list(filter, after.as_ref(), MATCHED_AT_ONCE).await?;
                let ids = page.items.into_iter().map(|row| row.id).collect();
                Ok((ids, page.next.map(|next| next.to_string())))
            }
        }
    }
}

/// One replay of quarantined records.
struct Replay {
    store: Arc<dyn QuarantineStore>,
    bus: Arc<dyn Bus>,
    claim_id: String,
    reason: String,
}

/// What became of the records of a replay, by id.
#[derive(Default)]
struct Outcome {
    replayed: HashSet<String>,
    /// Why these records were not replayed.
    failed: HashMap<String, String>,
}

impl Replay {
    async fn run(self, ids: Vec<String>) -> Result<Vec<QuarantineResult>, StoreError> {
        let mut rows = self.store.rows(&ids).await?;
        rows.sort_by(|a, b| (&a.topic, a.partition, a.offset).cmp(&(&b.topic, b.partition, b.offset)));
        let in_order: Vec<String> = rows.into_iter().map(|row| row.id).collect();
        let mut outcome = Outcome::default();
        let mut parts = in_order.chunks(AT_ONCE);
        for part in parts.by_ref() {
            if !self.publish(part, &mut outcome).await? {
                break;
            }
        }
        let untried = "was not tried, because the bus did not accept a record before it: replay it later";
        outcome.failed.extend(parts.flatten().map(|id| (id.clone(), untried.to_owned())));
        let rows = self.store.rows(&ids).await?;
        let explain = |row: &QuarantinedRow| match outcome.failed.get(&row.id) {
            Some(why) => Some(why.clone()),
            None if outcome.replayed.contains(&row.id) => None,
            None => Some(unchanged(row)),
        };
        Ok(results(&ids, &rows, explain))
    }

    /// Claims, publishes and marks these records. Returns false if the bus is not available.
    async fn publish(&self, ids: &[String], outcome: &mut Outcome) -> Result<bool, StoreError> {
        let mut claimed = self.store.claim(ids, &self.claim_id, LEASE).await?;
        if claimed.is_empty() {
            return Ok(true);
        }
        claimed.sort_by_key(|claimed| ids.iter().position(|id| *id == claimed.row.id));
        let records = claimed.iter().map(|claimed| Record {
            topic: claimed.row.topic.as_str().into(),
            // A bus takes the route modulo the number of partitions.
            route: u64::from(claimed.row.partition),
            key: claimed.row.key.clone(),
            value: claimed.value.clone(),
            headers: claimed.headers.clone(),
        });
        let answers = self.bus.publish(records.collect()).await;
        let (mut published, mut unavailable) = (Vec::new(), None);
        for (row, answer) in claimed.iter().map(|claimed| &claimed.row).zip(answers) {
            match answer {
                Ok(()) => published.push(row.id.clone()),
                Err(error) => {
                    let why = error.to_string();
                    tracing::warn!(id = row.id, topic = row.topic, why, "a quarantined record was not replayed");
                    outcome.failed.insert(row.id.clone(), why.clone());
                    match error {
                        PublishError::Refused { .. } => {
                            self.store.release(std::slice::from_ref(&row.id), &self.claim_id, &why).await?;
                        }
                        PublishError::Unavailable(_) => {
                            unavailable.get_or_insert((why, Vec::new())).1.push(row.id.clone());
                        }
                    }
                }
            }
        }
        let marked = self.store.mark_replayed(&published, &self.claim_id).await.inspect_err(|error| {
            let (ids, error) = (published.join(" "), error.chain());
            tracing::error!(
                ids,
                error,
                "records were published and not marked as replayed: another replay repeats them"
            );
        })?;
        let marked: HashSet<String> = marked.into_iter().collect();
        for row in claimed.iter().map(|claimed| &claimed.row).filter(|row| published.contains(&row.id)) {
            let QuarantinedRow { id, group, topic, partition, offset, .. } = row;
            if !marked.contains(id) {
                let why = "was published, but took so long that another replay may have published it, too".to_owned();
                outcome.failed.insert(id.clone(), why);
                continue;
            }
            let reason = &self.reason;
            tracing::warn!(id, group, topic, partition, offset, reason, "an operator replayed a quarantined record");
            metrics::counter!(QUARANTINE_REPLAYED, "group" => group.clone()).increment(1);
            outcome.replayed.insert(id.clone());
        }
        match &unavailable {
            None => Ok(true),
            Some((why, ids)) => {
                self.store.release(ids, &self.claim_id, why).await?;
                Ok(false)
            }
        }
    }
}

/// Why a record was neither replayed nor discarded, although nothing failed.
fn unchanged(row: &QuarantinedRow) -> String {
    match row.status {
        hub_store::QuarantineStatus::Replayed => "is replayed already".to_owned(),
        hub_store::QuarantineStatus::Discarded => "is discarded already".to_owned(),
        hub_store::QuarantineStatus::Quarantined if !row.is_replayable => {
            "cannot be replayed, because the bus could not read it: discard it".to_owned()
        }
        hub_store::QuarantineStatus::Quarantined => {
            format!("is being replayed by another request: try again in {} minutes", LEASE.as_secs() / 60)
        }
    }
}

/// The results in the order of the ids. `explain` says why a record was not changed.
fn results(
    ids: &[String],
    rows: &[QuarantinedRow],
    explain: impl Fn(&QuarantinedRow) -> Option<String>,
) -> Vec<QuarantineResult> {
    let rows: HashMap<&str, &QuarantinedRow> = rows.iter().map(|row| (row.id.as_str(), row)).collect();
    let result = |id: &String| match rows.get(id.as_str()) {
        Some(row) => QuarantineResult { id: parsed(id), status: Some(row.status.into()), detail: explain(row) },
        None => {
            let detail = Some("there is no quarantined record with this id".to_owned());
            QuarantineResult { id: parsed(id), status: None, detail }
        }
    };
    ids.iter().map(result).collect()
}

fn shown(row: QuarantinedRow) -> QuarantinedRecord {
    QuarantinedRecord {
        id: parsed(&row.id),
        group: row.group,
        topic: row.topic,
        partition: row.partition,
        offset: row.offset,
        key: row.key,
        size: row.size,
        reason: row.reason,
        status: QuarantineStatus::from(row.status),
        status_reason: row.status_reason,
        replayable: row.is_replayable,
        created_at: row.created_at,
        updated_at: row.updated_at,
    }
}

fn parsed(id: &str) -> Uuid {
    Uuid::parse_str(id).unwrap_or_default()
}

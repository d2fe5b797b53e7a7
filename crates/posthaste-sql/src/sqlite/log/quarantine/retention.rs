use std::time::Duration;

use posthaste_core::StoreError;
use posthaste_core::hub_store::{ExpiredRecords, QuarantineStatus};
use sqlx::{AssertSqlSafe, FromRow};

use super::super::LogTables;
use crate::outbox::limit;
use crate::sqlite::clock::{NOW_MS, millis};

/// Removes old records of one status. Their values go with them. Binds: the status, the age in milliseconds, the limit.
fn remove() -> String {
    format!(
        "DELETE FROM quarantined_record WHERE id IN (
             SELECT id FROM quarantined_record INDEXED BY quarantined_record_list
             WHERE status = ?1 AND created_at < {NOW_MS} - ?2 AND (claimed_until IS NULL OR claimed_until <= {NOW_MS})
             ORDER BY created_at, id LIMIT ?3)
         RETURNING group_name, topic"
    )
}

/// One write for each status, so that others do not wait for all of them.
pub(super) async fn remove_expired(
    tables: &LogTables,
    age: Duration,
    max: usize,
) -> Result<ExpiredRecords, StoreError> {
    let database = tables.database.in_background();
    let mut removed = Vec::new();
    for status in QuarantineStatus::ALL {
        let arguments = (status.code(), millis(age), limit(max));
        let remove = database.write_with("remove expired quarantined records", arguments, |connection, arguments| {
            Box::pin(async move {
                let (status, age, limit) = *arguments;
                let remove = sqlx::query(AssertSqlSafe(remove())).bind(status).bind(age).bind(limit);
                remove.fetch_all(connection).await
            })
        });
        for row in &remove.await? {
            // A row that cannot be read is removed all the same.
            let (group, topic) = <(String, String)>::from_row(row).unwrap_or_default();
            removed.push((status, group, topic));
        }
    }
    Ok(ExpiredRecords::count(removed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn expired_records_are_found_by_their_index() {
        let plan = plan_of(&remove()).await;
        let search = "SEARCH quarantined_record USING INDEX quarantined_record_list (status=? AND created_at<?)";
        assert!(plan.iter().any(|step| step == search), "{plan:?}");
        let lookup = "SEARCH quarantined_record USING COVERING INDEX sqlite_autoindex_quarantined_record_1 (id=?)";
        assert!(plan.iter().any(|step| step == lookup), "{plan:?}");
        assert!(plan.iter().all(|step| !step.starts_with("SCAN quar") && !step.contains("ORDER BY")), "{plan:?}");
    }
}

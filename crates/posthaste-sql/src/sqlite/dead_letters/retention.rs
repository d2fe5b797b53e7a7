use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use crate::outbox::limit;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::database::Database;

/// Removes dead letters that were delivered long ago. Their payloads and histories go with them. Binds: the age in
/// milliseconds, the limit.
fn remove() -> String {
    format!(
        "DELETE FROM dlt_event WHERE id IN (
             SELECT id FROM dlt_event INDEXED BY dlt_event_status_updated
             WHERE status = 1 AND updated_at < {NOW_MS} - ?1 ORDER BY updated_at, id LIMIT ?2)"
    )
}

pub(super) async fn remove_processed(database: &Database, older_than: Duration, max: usize) -> Result<u64, StoreError> {
    let arguments = (millis(older_than), limit(max));
    let remove = database.write_with("remove processed dead letters", arguments, |connection, arguments| {
        Box::pin(async move {
            let (age, limit) = *arguments;
            sqlx::query(AssertSqlSafe(remove())).bind(age).bind(limit).execute(connection).await
        })
    });
    Ok(remove.await?.rows_affected())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sqlite::plans::plan_of;

    #[tokio::test]
    async fn processed_dead_letters_are_found_by_their_index() {
        let plan = plan_of(&remove()).await;
        let search = "SEARCH dlt_event USING COVERING INDEX dlt_event_status_updated (status=? AND updated_at<?)";
        assert!(plan.iter().any(|step| step == search), "{plan:?}");
        let lookup = "SEARCH dlt_event USING COVERING INDEX sqlite_autoindex_dlt_event_1 (id=?)";
        assert!(plan.iter().any(|step| step == lookup), "{plan:?}");
        assert!(plan.iter().all(|step| !step.starts_with("SCAN dlt") && !step.contains("ORDER BY")), "{plan:?}");
    }
}

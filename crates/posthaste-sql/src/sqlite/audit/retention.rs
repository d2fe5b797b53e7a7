use std::time::Duration;

use posthaste_core::StoreError;
use sqlx::AssertSqlSafe;

use crate::outbox::limit;
use crate::sqlite::clock::{NOW_MS, millis};
use crate::sqlite::database::Database;

/// Removes old entries. Binds: the age in milliseconds, the limit.
fn remove() -> String {
    format!(
        "DELETE FROM audit_log WHERE (at, id) IN (
             SELECT at, id FROM audit_log WHERE at < ({NOW_MS} - ?1) * 1000 ORDER BY at, id LIMIT ?2)"
    )
}

pub(super) async fn remove_expired(database: &Database, age: Duration, max: usize) -> Result<u64, StoreError> {
    let arguments = (millis(age), limit(max));
    let remove = database.write_with("remove expired audit entries", arguments, |connection, arguments| {
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
    async fn expired_entries_are_found_by_their_time() {
        let plan = plan_of(&remove()).await.join("\n");
        assert!(plan.contains("PRIMARY KEY (at<?)") && plan.contains("PRIMARY KEY (at=? AND id=?)"), "{plan}");
        assert!(!plan.contains("SCAN audit_log") && !plan.contains("B-TREE"), "{plan}");
    }
}

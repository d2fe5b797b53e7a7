use std::sync::Arc;

use posthaste_core::Settled;
use posthaste_core::hub_store::DeadLetterClaimId;
use sqlx::{AssertSqlSafe, Row, SqliteConnection};

use crate::sqlite::clock::NOW_MS;
use crate::sqlite::json::json;

/// The dead letters that the given claims still have. Binds: the claims, see [`bind`].
const FENCED: &str = "FROM (SELECT value ->> 0 AS id, value ->> 1 AS claim_id FROM json_each(?1)) AS claimed
     WHERE dlt_event.id = claimed.id AND dlt_event.locked_by = claimed.claim_id";

fn bind(claims: &[(String, DeadLetterClaimId)]) -> Result<String, sqlx::Error> {
    let rows: Vec<(&str, String)> = claims.iter().map(|(id, claim_id)| (id.as_str(), claim_id.to_string())).collect();
    json(&rows)
}

pub(super) async fn renew(
    connection: &mut SqliteConnection,
    claims: Arc<Vec<(String, DeadLetterClaimId)>>,
    lease: i64,
) -> Result<Vec<Settled>, sqlx::Error> {
    let sql = format!("UPDATE dlt_event SET locked_until = {NOW_MS} + ?2 {FENCED} RETURNING dlt_event.id");
    let rows = sqlx::query(AssertSqlSafe(sql)).bind(bind(&claims)?).bind(lease).fetch_all(connection).await?;
    let renewed = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?;
    Ok(claims.iter().map(|(id, _)| Settled::of(renewed.contains(id))).collect())
}

pub(super) async fn release(
    connection: &mut SqliteConnection,
    claims: Arc<Vec<(String, DeadLetterClaimId)>>,
) -> Result<(), sqlx::Error> {
    let sql = format!("UPDATE dlt_event SET locked_by = NULL, locked_until = NULL {FENCED}");
    sqlx::query(AssertSqlSafe(sql)).bind(bind(&claims)?).execute(connection).await.map(|_| ())
}

pub(super) async fn release_all(connection: &mut SqliteConnection, owner: Arc<String>) -> Result<(), sqlx::Error> {
    // The claims of this owner are `owner:number`, and `;` follows `:`.
    const RELEASE: &str = "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL
         WHERE locked_by > ?1 || ':' AND locked_by < ?1 || ';'";
    sqlx::query(RELEASE).bind(owner.as_str()).execute(connection).await.map(|_| ())
}

pub(super) async fn void(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    const VOID: &str = "UPDATE dlt_event SET locked_by = NULL, locked_until = NULL WHERE locked_by IS NOT NULL";
    sqlx::query(VOID).execute(connection).await.map(|_| ())
}

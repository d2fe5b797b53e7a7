use std::collections::HashSet;
use std::time::Duration;

use posthaste_core::hub_store::DeadLetterClaimId;
use posthaste_core::{Settled, StoreError};
use sqlx::{AssertSqlSafe, PgConnection};

use crate::postgres::clock::{CLOCK, NOW, micros};
use crate::postgres::database::Database;
use crate::postgres::log::{STATEMENT_TIMEOUT, WRITE, limited};
use crate::session::Failed;

/// The dead letters that these claims still have. Binds: the ids, the claims.
pub(super) const CLAIMED: &str = "SELECT letter.id, letter.locked_by
     FROM unnest($1::text[], $2::text[]) AS asked (id, claim_id) JOIN dlt_event AS letter ON letter.id = asked.id
     WHERE letter.locked_by = asked.claim_id AND letter.status <> 1";

/// The same, locked, except those that another transaction has locked: neither a settlement nor a renewal waits for them.
pub(super) fn lock_claimed() -> String {
    format!("{CLAIMED} FOR NO KEY UPDATE OF letter SKIP LOCKED")
}

/// Binds: the ids, the claims, the lease in microseconds.
pub(super) fn renew_leases() -> String {
    format!(
        "WITH renewed AS MATERIALIZED ({})
         UPDATE dlt_event SET locked_until = {CLOCK} + $3 * interval '1 microsecond'
         FROM renewed WHERE dlt_event.id = renewed.id AND dlt_event.locked_by = renewed.locked_by
         RETURNING dlt_event.id, dlt_event.locked_by",
        lock_claimed()
    )
}

/// Binds: the ids, the claims.
pub(super) fn release_leases() -> String {
    release_of(&format!("{CLAIMED} ORDER BY letter.id FOR NO KEY UPDATE OF letter"))
}

/// The leases of one owner. Only dead letters that are due are leased. No index has claims: it would cost every claim more
/// than this statement costs, which runs when a process stops. Binds: the owner.
pub(super) fn release_leases_of_owner() -> String {
    // The claims of this owner are `owner:number`, and `;` follows `:`.
    release_of(&format!(
        "SELECT letter.id, letter.locked_by FROM dlt_event AS letter
         WHERE due IS NOT NULL AND due <= {NOW} AND locked_by > $1 || ':' AND locked_by < $1 || ';'
         ORDER BY letter.id FOR NO KEY UPDATE"
    ))
}

fn release_of(leased: &str) -> String {
    format!(
        "WITH released AS MATERIALIZED ({leased})
         UPDATE dlt_event SET locked_by = NULL, locked_until = NULL
         FROM released WHERE dlt_event.id = released.id AND dlt_event.locked_by = released.locked_by"
    )
}

/// The ids and the claims, as binds.
pub(super) fn columns(claims: &[(String, DeadLetterClaimId)]) -> (Vec<&str>, Vec<String>) {
    claims.iter().map(|(id, claim_id)| (id.as_str(), claim_id.to_string())).unzip()
}

/// A dead letter and the claim that it is leased by.
pub(super) type Leased = HashSet<(String, String)>;

/// Those of the claims that still have their dead letters, also if another transaction has locked these.
pub(super) async fn still_claimed(
    connection: &mut PgConnection,
    claims: &[(String, DeadLetterClaimId)],
) -> Result<Leased, sqlx::Error> {
    let (ids, claim_ids) = columns(claims);
    let claimed: Vec<(String, String)> =
        sqlx::query_as(CLAIMED).bind(ids).bind(claim_ids).fetch_all(connection).await?;
    Ok(claimed.into_iter().collect())
}

pub(super) async fn renew(
    database: &Database,
    claims: &[(String, DeadLetterClaimId)],
    lease: Duration,
) -> Result<Vec<Settled>, StoreError> {
    let renew = async {
        let mut work = database.renewals().begin(WRITE).await?;
        let (ids, claim_ids) = columns(claims);
        let renew = sqlx::query_as(AssertSqlSafe(renew_leases())).bind(ids).bind(claim_ids).bind(micros(lease));
        let renewed: Vec<(String, String)> = renew.fetch_all(&mut *work).await?;
        let renewed: Leased = renewed.into_iter().collect();
        let locked = match renewed.len() < claims.len() {
            true => still_claimed(&mut work, claims).await?,
            false => Leased::new(),
        };
        work.commit().await?;
        let result = |(id, claim_id): &(String, DeadLetterClaimId)| {
            let key = (id.clone(), claim_id.to_string());
            match (renewed.contains(&key), locked.contains(&key)) {
                (true, _) => Settled::Applied,
                (false, true) => Settled::Locked,
                (false, false) => Settled::LostLease,
            }
        };
        Ok::<_, Failed>(claims.iter().map(result).collect())
    };
    limited("renew the leases of dead letters", STATEMENT_TIMEOUT, renew).await
}

pub(super) async fn release(database: &Database, claims: &[(String, DeadLetterClaimId)]) -> Result<(), StoreError> {
    let (ids, claim_ids) = columns(claims);
    let release = sqlx::query(AssertSqlSafe(release_leases())).bind(ids).bind(claim_ids);
    database.write("release dead letters", release).await.map(|_| ())
}

pub(super) async fn release_all(database: &Database, owner: &str) -> Result<(), StoreError> {
    let release = sqlx::query(AssertSqlSafe(release_leases_of_owner())).bind(owner);
    database.write("release dead letters", release).await.map(|_| ())
}

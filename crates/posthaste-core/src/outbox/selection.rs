use std::collections::HashMap;
use std::sync::Arc;

use super::{Position, STARTED};

/// All payloads of one claim together have at most this many bytes, unless a single row is larger.
pub const MAX_CLAIM_BYTES: usize = 16 << 20;

/// How many suspects that lost one lease are claimed together. A process that crashes leaves as many suspects as it had
/// in flight: one by one, they would take too long.
pub const SUSPECT_GROUP: usize = 100;

/// A row that has lost this many leases is assumed to crash the processes that deliver it. It lost the first lease
/// among many rows, the second in a group of suspects, and the others alone.
pub const DEAD_AFTER_LOSSES: u32 = 4;

/// A due row that a claim has found and locked, in the order of reading.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its position in the order of delivery.
    pub position: Position,
    /// Ordered mode: its aggregate; `None` is unordered.
    pub key: Option<Arc<str>>,
    /// Ordered mode: the last unfinished row of its key before it, whether it is a candidate or not.
    pub predecessor: Option<i64>,
    /// The claim id of the lease that has ended without a settlement, if there is one (`locked_by`).
    pub ended_lease: Option<String>,
    /// How many leases it lost before that (`lease_losses`).
    pub lease_losses: u32,
    /// The size of its payload.
    pub bytes: usize,
}

impl Candidate {
    /// How many leases the row has lost, including the one that has just ended.
    ///
    /// After the first loss, only a lease under which a delivery had started counts. A claim whose result was lost, an
    /// outage or a paused process cannot make a row DEAD that was never delivered.
    fn losses(&self) -> u32 {
        let counts = |claim_id: &String| self.lease_losses == 0 || claim_id.ends_with(STARTED);
        self.lease_losses + u32::from(self.ended_lease.as_ref().is_some_and(counts))
    }

    /// True if the row may have crashed the process that claimed it.
    fn is_suspect(&self) -> bool {
        self.losses() > 0
    }

    /// True if no unfinished row of its key precedes it.
    fn is_head(&self) -> bool {
        self.key.is_none() || self.predecessor.is_none()
    }
}

/// What a claim does with its candidates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The rows to lease, in the order of delivery: the rows of one key together, in the order of their numbers.
    pub claimed: Vec<i64>,
    /// The new `lease_losses` of those rows. It is the same for all rows of a claim.
    pub losses: u32,
    /// The row that has lost too many leases and becomes DEAD with this error. Nothing else is claimed with it.
    pub dead: Option<(i64, String)>,
    /// Ordered mode: rows that must wait, each with the row before it that it waits for.
    pub blocked: Vec<(i64, i64)>,
    /// A row was not claimed because the claim has reached its limit of bytes.
    pub is_cut: bool,
}

/// Decides which candidates are claimed. This is the rule of every database and every mode that leases rows; without
/// order, every row is a key of its own.
///
/// - A key is claimed from its head (the row that no unfinished row of its key precedes) as far as its rows follow each
///   other among the candidates. A row whose predecessor is not claimed is blocked by it.
/// - When the first candidate is a suspect and the head of its key, only suspects are claimed: those that lost one
///   lease together, a row that lost more alone. A row that lost [`DEAD_AFTER_LOSSES`] is not claimed but becomes DEAD.
/// - Otherwise no suspect is claimed, and neither is a row after one.
pub fn select(candidates: &[Candidate]) -> Selection {
    match candidates.first() {
        Some(first) if first.is_suspect() && first.is_head() => select_suspects(first, candidates),
        _ => select_runs(candidates),
    }
}

fn select_suspects(first: &Candidate, candidates: &[Candidate]) -> Selection {
    let losses = first.losses();
    if losses >= DEAD_AFTER_LOSSES && first.ended_lease.is_some() {
        let error = format!("lease_lost: {losses} claims of it ended without a settlement");
        return Selection { losses, dead: Some((first.position.seq, error)), ..Selection::default() };
    }
    let mut selection = Selection { losses, ..Selection::default() };
    let limit = if losses == 1 { SUSPECT_GROUP } else { 1 };
    let alike = candidates.iter().filter(|row| row.losses() == losses && row.is_head());
    let mut bytes = 0;
    for row in alike.take(limit) {
        if bytes >= MAX_CLAIM_BYTES {
            selection.is_cut = true;
            break;
        }
        selection.claimed.push(row.position.seq);
        bytes += row.bytes;
    }
    selection
}

fn select_runs(candidates: &[Candidate]) -> Selection {
    let mut by_key: HashMap<&str, Vec<&Candidate>> = HashMap::new();
    for row in candidates {
        if let Some(key) = &row.key {
            by_key.entry(key).or_default().push(row);
        }
    }
    for rows in by_key.values_mut() {
        rows.sort_unstable_by_key(|row| row.position.seq);
    }
    let (mut selection, mut bytes) = (Selection::default(), 0);
    for row in candidates {
        let Some(key) = &row.key else {
            match bytes >= MAX_CLAIM_BYTES {
                _ if row.is_suspect() => {}
                true => selection.is_cut = true,
                false => {
                    selection.claimed.push(row.position.seq);
                    bytes += row.bytes;
                }
            }
            continue;
        };
        // The first candidate of a key adds all candidates of its key.
        let (mut last, mut continues) = (None, true);
        for row in by_key.remove(key.as_ref()).unwrap_or_default() {
            continues &= !row.is_suspect() && row.predecessor == last;
            if continues && bytes >= MAX_CLAIM_BYTES {
                selection.is_cut = true;
                break;
            }
            match row.predecessor {
                _ if continues => {
                    selection.claimed.push(row.position.seq);
                    bytes += row.bytes;
                    last = Some(row.position.seq);
                }
                Some(predecessor) => selection.blocked.push((row.position.seq, predecessor)),
                None => {}
            }
        }
    }
    selection
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(seq: i64, key: &str, predecessor: Option<i64>) -> Candidate {
        let key = (!key.is_empty()).then(|| Arc::from(key));
        let position = Position { due: 0, seq };
        Candidate { position, key, predecessor, ended_lease: None, lease_losses: 0, bytes: 1 }
    }

    fn claims(claimed: &[i64], losses: u32) -> Selection {
        Selection { claimed: claimed.to_vec(), losses, ..Selection::default() }
    }

    #[test]
    fn a_run_begins_with_the_head_and_continues_while_rows_follow_each_other() {
        let rows = [
            candidate(1, "a", None),
            candidate(2, "b", Some(0)),
            candidate(3, "", None),
            candidate(5, "a", Some(1)),
            // Row 6 of the same key is not due: the rows after it wait for it.
            candidate(7, "a", Some(6)),
            candidate(8, "a", Some(7)),
        ];
        let selection = select(&rows);
        assert_eq!(selection.claimed, [1, 5, 3]);
        assert_eq!(selection.blocked, [(7, 6), (8, 7), (2, 0)]);
    }

    #[test]
    fn a_row_that_lost_two_leases_is_claimed_alone_and_only_when_it_is_first() {
        let mut rows = [candidate(1, "a", None), candidate(2, "a", Some(1)), candidate(3, "b", None)];
        rows[0].lease_losses = 2;
        assert_eq!(select(&rows), claims(&[1], 2));
        rows.rotate_right(1);
        assert_eq!(select(&rows), Selection { blocked: vec![(2, 1)], ..claims(&[3], 0) });
    }

    #[test]
    fn rows_that_lost_one_lease_are_claimed_in_groups_and_nothing_else_with_them() {
        let mut rows: Vec<Candidate> = (0..300).map(|seq| candidate(seq, "", None)).collect();
        for (place, row) in rows.iter_mut().enumerate() {
            row.lease_losses = [1, 0, 2][place % 3];
        }
        let claimed = select(&rows).claimed;
        assert_eq!(claimed, (0..300).step_by(3).collect::<Vec<i64>>());
        assert_eq!(claimed.len(), SUSPECT_GROUP);
        let of_one_key = [candidate(1, "a", None), candidate(2, "a", Some(1))];
        let of_one_key = of_one_key.map(|row| Candidate { lease_losses: 1, ..row });
        assert_eq!(select(&of_one_key).claimed, [1], "a row after a suspect waits for it");
    }

    #[test]
    fn after_the_first_loss_only_a_delivery_that_started_counts() {
        let lost = |lease_losses, claim_id: &str| {
            let row = candidate(1, "", None);
            select(&[Candidate { lease_losses, ended_lease: Some(claim_id.to_owned()), ..row }])
        };
        assert_eq!(lost(0, "p:1"), claims(&[1], 1));
        assert_eq!(lost(1, "p:1"), claims(&[1], 1), "nothing was delivered under this claim");
        assert_eq!(lost(1, "p:1:started"), claims(&[1], 2));
        assert_eq!(lost(3, "p:1"), claims(&[1], 3));
        let dead = lost(3, "p:1:started");
        assert_eq!((dead.claimed.len(), dead.losses), (0, 4));
        let (seq, error) = dead.dead.unwrap();
        assert_eq!((seq, error.as_str()), (1, "lease_lost: 4 claims of it ended without a settlement"));
    }

    #[test]
    fn a_claim_is_limited_in_bytes_except_for_its_first_row() {
        let mut rows = [candidate(1, "a", None), candidate(2, "a", Some(1)), candidate(3, "", None)];
        rows[0].bytes = MAX_CLAIM_BYTES + 1;
        assert_eq!(select(&rows), Selection { is_cut: true, ..claims(&[1], 0) });
    }
}

use std::collections::{HashMap, HashSet};
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::{Mode, Reader, TableName};
use crate::{BoxError, Disposition, Event, Failure, FaultKind, StoreError, Wakeup};

/// What the payloads of one claim may bring into memory, but for one that is larger alone.
pub const MAX_CLAIM_BYTES: usize = 16 << 20;

/// How much of a failure a row keeps, in characters.
const LONGEST_ERROR: usize = 4_000;

/// A service's connections to its database, from which its [`Store`] is opened.
#[async_trait]
pub trait Pool<S: Store + super::Upkeep>: Send + Sync + 'static {
    /// Brings the table up to date and opens it.
    async fn open(&self, table: TableName, mode: Mode) -> Result<S, OpenError>;
}

/// Why an outbox cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The database cannot hold an outbox as it is.
    #[error("{problem}: {remedy}")]
    Unsuitable {
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        remedy: String,
    },
    /// A newer program made its table.
    #[error(
        "outbox table {table} has schema {found}, newer than this program, which knows {known}: use a newer posthaste"
    )]
    NewerSchema {
        /// The table in question.
        table: TableName,
        /// The newest migration that was made.
        found: i64,
        /// The newest migration that this program knows.
        known: i64,
    },
    /// Its table is missing or out of date, and this user may not change that.
    #[error("outbox table {table} cannot be brought up to date: let a user who may create tables run the migrations")]
    Migration {
        /// The table in question.
        table: TableName,
        /// What went wrong.
        #[source]
        source: BoxError,
    },
    /// Its table belongs to the other kind of reader.
    #[error(
        "outbox table {table} is read by {recorded} and cannot be read by {asked}: give this one another table name"
    )]
    OtherReader {
        /// The table in question.
        table: TableName,
        /// The kind that opened it first.
        recorded: String,
        /// The kind that was asked for now.
        asked: Reader,
    },
    /// Its table is read in another mode; the modes know nothing of each other's claims.
    #[error(
        "outbox table {table} is read in mode {recorded} and cannot be read in mode {asked}: use that mode, or stop all \
         that read it and then change mode in table {table}_owner"
    )]
    OtherMode {
        /// The table in question.
        table: TableName,
        /// The mode in which it was opened first.
        recorded: String,
        /// The mode that was asked for now.
        asked: &'static str,
    },
    /// The database did not do what it was asked.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// One outbox table in one database: statements and nothing else.
///
/// Who calls it sees to it that claims are not made twice within one process, that only what is held is settled, and
/// that positions are given up from time to time; who implements it sees to the rows.
///
/// # Laws
///
/// Times are the database's own, read inside the statement: `now` below is that clock. A row is *pending* while its
/// status is NEW or RETRY, *unfinished* while it is pending, or DEAD where a dead head blocks its key.
///
/// - Every statement MUST be one transaction, or part of the caller's where a connection is given.
/// - `take` MUST answer in the order of (`available_at`, `seq`), and MUST NOT answer a row that is not due, not pending,
///   left out, or leased by a lease that has not ended.
/// - A change MUST NOT touch a row that is not pending, or whose fence does not stand.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// What a statement of the service runs on.
    type Connection: Send;
    /// Begun by [`begin`](Self::begin); rolled back when it is dropped.
    type Transaction: DerefMut<Target = Self::Connection> + Send;

    /// The table in question.
    fn table(&self) -> &TableName;

    /// How it is read.
    fn mode(&self) -> Mode;

    /// Records the kind of reader and the mode where nothing is recorded yet, and answers with what is recorded now.
    async fn register(&self, reader: Reader) -> Result<Registration, StoreError>;

    /// Single node: makes `owner` the owner for one lease from now, if it is the owner, or there is none, or its lease
    /// has ended. The generation rises with every change of owner.
    async fn own(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError>;

    /// Single node: ends the ownership of this owner, if it has it.
    async fn disown(&self, owner: &str) -> Result<(), StoreError>;

    /// Begins a transaction of the service. On databases with one writer it waits for its turn here.
    async fn begin(&self) -> Result<Self::Transaction, StoreError>;

    /// An error of kind [`FaultKind::OutcomeUnknown`] means that it may have committed.
    async fn commit(&self, transaction: Self::Transaction) -> Result<(), StoreError>;

    /// Undoes it.
    async fn rollback(&self, transaction: Self::Transaction) -> Result<(), StoreError>;

    /// Inserts in this order, many rows to a statement, and answers with their numbers in the same order. `created_at`
    /// and the `available_at` of what is not delayed until a time are `now` (+ delay).
    ///
    /// With a lock, the rows are born leased: `locked_by` is the lock, `locked_at` is `now`.
    async fn insert(
        &self,
        connection: &mut Self::Connection,
        events: &[&Event],
        lock: Option<&str>,
    ) -> Result<Vec<i64>, StoreError>;

    /// Which of these rows, just inserted on this connection, a commit would leave: a database may have undone them after
    /// an error that the service did not heed. An error means that nothing can commit any more.
    async fn standing(&self, connection: &mut Self::Connection, rows: &[i64]) -> Result<HashSet<i64>, StoreError>;

    /// Takes rows that are due. What that means depends on the mode:
    ///
    /// - single node: they are read, nothing is written;
    /// - multi node: they are leased (`locked_by` = the lock, `locked_at` = `now`). A row whose lease has ended, or that
    ///   lost one before (`lease_losses` > 0), is a suspect: taken only where `suspects` allows, alone, and only when it
    ///   is the first in the order. Taking over an ended lease adds one to `lease_losses`; the third loss makes it DEAD
    ///   with an error that begins with `lease_lost`, and it is answered as dead;
    /// - ordered: as multi node, but by key, see [`choose_runs`]. Rows that were met and not chosen are *parked*: later
    ///   calls do not meet them again until a row before them is finished, when a hundred behind it are unparked.
    ///
    /// All rows of a claim together weigh at most [`MAX_CLAIM_BYTES`], but for one that is larger alone.
    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, StoreError>;

    /// How long until the first pending row is due that is not left out, not leased, not parked, and no suspect where
    /// `wanted.suspects` is false. Limit, position and lock are ignored.
    async fn next_due(&self, wanted: &Wanted<'_>) -> Result<Option<Duration>, StoreError>;

    /// Carries out those changes whose fence still stands and whose row is pending, and answers with their rows. All in
    /// one transaction. `fences` are, single node: `owner:generation` of those under which the rows were claimed;
    /// else: the locks of the rows.
    ///
    /// A changed row is no longer leased. DONE and DEAD set `done_at`; a wait sets `available_at` to `now` + wait; what is
    /// neither DONE nor DEAD loses its `lease_losses`, because an attempt came to its end.
    async fn record(&self, fences: &[String], changes: &[Change]) -> Result<HashSet<i64>, StoreError>;

    /// Starts the leases of these rows anew where one of these locks still holds them; answers with those rows.
    async fn renew(&self, locks: &[String], rows: &[i64]) -> Result<HashSet<i64>, StoreError>;

    /// Ends the leases of these rows where one of these locks still holds them, without a trace.
    async fn release(&self, locks: &[String], rows: &[i64]) -> Result<(), StoreError>;

    /// Event types with something due.
    async fn pending_types(&self) -> Result<Vec<String>, StoreError>;

    /// Whether the database can tell other processes something.
    fn tells_others(&self) -> bool;

    /// Tells other processes that something was committed, where the database can. Never part of the service's
    /// transaction.
    async fn notify(&self) -> Result<(), StoreError>;

    /// Wakes when it begins to hear, and whenever another process notifies, until the future is dropped. Where the database
    /// cannot, or no longer, it never answers; an error means that hints were lost.
    async fn listen(&self, wakeup: Wakeup) -> Result<(), StoreError>;
}

/// What a table's readers agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// As [`Reader::word`] says it.
    pub reader: String,
    /// As [`Mode::word`] says it.
    pub mode: String,
}

/// Who owns a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Who asked.
    Us {
        /// Rises with every change of owner.
        generation: i64,
    },
    /// Another process, for this long unless it refreshes its lease.
    Other {
        /// Until its lease ends.
        remaining: Duration,
    },
}

/// What a claim asks for.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// `None` for all event types.
    pub event_type: Option<&'a str>,
    /// Rows that this process holds.
    pub left_out: &'a [i64],
    /// How many rows at most.
    pub limit: usize,
    /// The position behind which to begin.
    pub behind: Option<Position>,
    /// In whose name rows are leased. Unique per claim.
    pub lock: &'a str,
    /// How long a lease lasts.
    pub lease: Duration,
    /// Whether a row that lost a lease may be taken.
    pub suspects: bool,
    /// Rows are left out whose `created_at` is less than this before `now`.
    pub skip_recent: Duration,
}

/// A place in the order of delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// When it is due, in the store's own unit.
    pub due: i64,
    /// Its number.
    pub seq: i64,
}

/// What a claim took.
#[derive(Debug, Default)]
pub struct Taken {
    /// In the order of delivery.
    pub rows: Vec<Pending>,
    /// There may be more, though fewer came than were asked for.
    pub more: bool,
    /// The last position that was looked at.
    pub last: Option<Position>,
}

/// A pending row as a claim reads it.
#[derive(Debug)]
pub struct Pending {
    /// Where it stands in the order.
    pub position: Position,
    /// The database's time of its insert.
    pub created_at: DateTime<Utc>,
    /// How often it was tried, and what it is; or why that cannot be told.
    pub event: Result<(u32, Event), String>,
    /// Its leases were lost so often that it went dead.
    pub is_dead: bool,
    /// A lease of it was lost before.
    pub is_suspect: bool,
    /// Ordered: what it is about.
    pub key: Option<Arc<str>>,
}

/// Where an event stands in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutboxStatus {
    /// Not tried yet, or asked to wait.
    New,
    /// Delivered.
    Done,
    /// Failed, and will be tried again.
    Retry,
    /// Given up.
    Dead,
}

impl OutboxStatus {
    /// Of the number in the column `status`.
    pub fn of_code(code: i64) -> Self {
        match code {
            0 => Self::New,
            1 => Self::Done,
            2 => Self::Retry,
            _ => Self::Dead,
        }
    }

    /// The number in the column `status`.
    pub fn code(self) -> i16 {
        match self {
            Self::New => 0,
            Self::Done => 1,
            Self::Retry => 2,
            Self::Dead => 3,
        }
    }
}

/// What is to be recorded of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Which row.
    pub seq: i64,
    /// What it becomes.
    pub status: OutboxStatus,
    /// What its attempts become, where the attempt counts. A number and not one more: who repeats a change because its
    /// answer was lost does not count twice.
    pub attempts: Option<u32>,
    /// From `now`, when it is due again; `None` leaves `available_at` alone.
    pub wait: Option<Duration>,
    /// Replaces `last_error` where there is one; short enough to be stored.
    pub error: Option<String>,
}

impl Change {
    /// What follows from the disposition of this attempt.
    pub fn of(seq: i64, attempt: u32, disposition: &Disposition) -> Self {
        match disposition {
            Disposition::Done => Self { seq, status: OutboxStatus::Done, attempts: None, wait: None, error: None },
            Disposition::Retry { after, counted, failure } => Self {
                seq,
                // A wait that nobody is to blame for leaves the row as good as new.
                status: if *counted || failure.is_some() { OutboxStatus::Retry } else { OutboxStatus::New },
                attempts: counted.then_some(attempt),
                wait: Some(*after),
                error: failure.as_ref().map(error_text),
            },
            Disposition::Dead(failure) => Self::dead(seq, failure),
        }
    }

    /// The row is given up.
    pub fn dead(seq: i64, failure: &Failure) -> Self {
        Self { seq, status: OutboxStatus::Dead, attempts: None, wait: None, error: Some(error_text(failure)) }
    }
}

/// A failure as a row keeps it.
fn error_text(failure: &Failure) -> String {
    // No database but one keeps U+0000 in a text, and nobody would see it.
    let text = failure.to_string().replace('\0', "\u{fffd}");
    match text.char_indices().nth(LONGEST_ERROR) {
        None => text,
        Some(_) => text.chars().take(LONGEST_ERROR - 3).chain("...".chars()).collect(),
    }
}

/// A due and free row that an ordered claim met, in the order of reading.
#[derive(Clone, Debug)]
pub struct Met {
    /// Where it stands.
    pub position: Position,
    /// What it is about; `None` is unordered.
    pub key: Option<Arc<str>>,
    /// The last unfinished row of its key before it, whether met or not.
    pub predecessor: Option<i64>,
    /// It lost a lease before, or does now.
    pub is_suspect: bool,
    /// What its payload weighs.
    pub bytes: usize,
}

/// Which of the rows that an ordered claim met are taken, and which are parked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// In the order of delivery: the rows of one key stand together, in the order of their numbers.
    pub taken: Vec<i64>,
    /// Row, and the row before it that it waits for.
    pub parked: Vec<(i64, i64)>,
    /// Something was not taken because of its weight.
    pub is_cut: bool,
}

/// A key is taken from its head (the row before which nothing of its key is unfinished) as far as its rows follow each
/// other among those that were met. A row whose predecessor was not taken waits for it.
///
/// A suspect is taken alone, when it comes first; else neither it nor what stands behind it is taken or parked now.
pub fn choose_runs(met: &[Met]) -> Chosen {
    if let Some(first) = met.first()
        && first.is_suspect
        && (first.key.is_none() || first.predecessor.is_none())
    {
        return Chosen { taken: vec![first.position.seq], ..Chosen::default() };
    }
    let mut by_key: HashMap<&str, Vec<&Met>> = HashMap::new();
    for row in met {
        if let Some(key) = &row.key {
            by_key.entry(key).or_default().push(row);
        }
    }
    for rows in by_key.values_mut() {
        rows.sort_unstable_by_key(|row| row.position.seq);
    }
    let (mut chosen, mut weight) = (Chosen::default(), 0);
    for row in met {
        let Some(key) = &row.key else {
            match weight >= MAX_CLAIM_BYTES {
                _ if row.is_suspect => {}
                true => chosen.is_cut = true,
                false => {
                    chosen.taken.push(row.position.seq);
                    weight += row.bytes;
                }
            }
            continue;
        };
        // The first row that is met of a key brings all of its key.
        let (mut last, mut goes_on) = (None, true);
        for row in by_key.remove(key.as_ref()).unwrap_or_default() {
            goes_on &= !row.is_suspect && row.predecessor == last;
            if goes_on && weight >= MAX_CLAIM_BYTES {
                chosen.is_cut = true;
                break;
            }
            match row.predecessor {
                _ if goes_on => {
                    chosen.taken.push(row.position.seq);
                    weight += row.bytes;
                    last = Some(row.position.seq);
                }
                Some(predecessor) => chosen.parked.push((row.position.seq, predecessor)),
                None => {}
            }
        }
    }
    chosen
}

/// The connection was cut while the commit was under way.
pub(super) fn is_unknown(error: &StoreError) -> bool {
    error.kind() == FaultKind::OutcomeUnknown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_cut_at_whole_characters() {
        let of = |length: usize| error_text(&Failure::transient("c", "é".repeat(length)));
        assert_eq!(of(LONGEST_ERROR - 3), format!("c: {}", "é".repeat(LONGEST_ERROR - 3)));
        let cut = of(LONGEST_ERROR);
        assert_eq!(cut.chars().count(), LONGEST_ERROR);
        assert!(cut.ends_with("é..."));
    }

    fn met(seq: i64, key: &str, predecessor: Option<i64>) -> Met {
        let key = (!key.is_empty()).then(|| Arc::from(key));
        Met { position: Position { due: 0, seq }, key, predecessor, is_suspect: false, bytes: 1 }
    }

    #[test]
    fn a_run_begins_with_the_head_and_goes_on_while_rows_follow_each_other() {
        let met = [
            met(1, "a", None),
            met(2, "b", Some(0)),
            met(3, "", None),
            met(5, "a", Some(1)),
            // Row 6 of the same key is not due: what follows waits for it.
            met(7, "a", Some(6)),
            met(8, "a", Some(7)),
        ];
        let chosen = choose_runs(&met);
        assert_eq!(chosen.taken, [1, 5, 3]);
        assert_eq!(chosen.parked, [(7, 6), (8, 7), (2, 0)]);
    }

    #[test]
    fn a_suspect_is_taken_alone_and_only_first() {
        let mut rows = [met(1, "a", None), met(2, "a", Some(1)), met(3, "b", None)];
        rows[0].is_suspect = true;
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![1], ..Chosen::default() });
        rows.rotate_right(1);
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![3], parked: vec![(2, 1)], is_cut: false });
    }

    #[test]
    fn a_claim_is_bounded_in_bytes_but_for_one_row() {
        let mut rows = [met(1, "a", None), met(2, "a", Some(1)), met(3, "", None)];
        rows[0].bytes = MAX_CLAIM_BYTES + 1;
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![1], parked: vec![], is_cut: true });
    }
}

use std::collections::{HashMap, HashSet};
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::{Mode, Reader, Registration, TableName};
use crate::{BoxError, Disposition, Event, Failure, Settled, StoreError, Wakeup};

/// What the payloads of one claim may bring into memory, but for one that is larger alone.
pub const MAX_CLAIM_BYTES: usize = 16 << 20;

/// How many rows that lost one lease are claimed together. A process that dies leaves as many suspects as it had in
/// flight: one by one they would take their time.
pub const SUSPECT_GROUP: usize = 100;

/// After how many lost leases a row is assumed to crash the processes that deliver it. The first is lost among many rows,
/// the second in a group of suspects, the others alone.
pub const DEAD_AFTER_LOSSES: u32 = 4;

/// Among how many rows that are due a lost claim is searched for. Claims take rows from the head.
pub const FOUND_AMONG: usize = 100_000;

/// The error of a row that lost so many leases.
pub fn lease_lost_error(losses: u32) -> String {
    format!("lease_lost: {losses} processes that claimed it did not settle it")
}

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
    /// Its table is read with another lease; each process judges by its own whether another's lease has ended.
    #[error(
        "outbox table {table} is read with a lease of {recorded:?} and cannot be read with one of {asked:?}: use that \
         lease in all processes, or stop all that read the table and then set lease_ms to NULL in table {table}_owner, \
         so that the next start records its own"
    )]
    OtherLease {
        /// The table in question.
        table: TableName,
        /// The lease with which it was opened first.
        recorded: Duration,
        /// The lease that was asked for now.
        asked: Duration,
    },
    /// Its table is read with another rule for the events behind a dead one.
    #[error(
        "outbox table {table} is read with the rule {recorded} for events behind a dead one and cannot be read with the \
         rule {asked}: use that rule in all processes, or stop all that read the table and then set dead_head to NULL in \
         table {table}_owner, so that the next start records its own"
    )]
    OtherDeadHead {
        /// The table in question.
        table: TableName,
        /// The rule with which it was opened first, as [`DeadHead::word`](super::DeadHead::word) says it.
        recorded: String,
        /// The rule that was asked for now.
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

    /// Records [`Registration::of`] these where nothing is recorded yet, and answers with what is recorded now. A record of
    /// the same reader and mode that lacks a lease or a rule gets this one's. What is recorded never changes otherwise, so
    /// processes that start at once are all answered the same.
    async fn register(&self, reader: Reader, lease: Duration) -> Result<Registration, StoreError>;

    /// Single node: makes `owner` the owner for one lease from now, if it is the owner, or there is none, or its lease
    /// has ended. The generation rises with every change of owner.
    async fn own(&self, owner: &str, lease: Duration) -> Result<Owner, StoreError>;

    /// Single node: ends the ownership of this owner, if it has it.
    async fn disown(&self, owner: &str) -> Result<(), StoreError>;

    /// Begins a transaction of the service. On databases with one writer it waits for its turn here.
    async fn begin(&self) -> Result<Self::Transaction, StoreError>;

    /// An error of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that it may have committed.
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

    /// Which of these rows, inserted in the transaction of this connection, a commit would leave: a database may have undone
    /// them after an error that the service ignored. An error means that the transaction cannot commit any more, even if
    /// the database would answer its COMMIT with success; of kind [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown), that parts of it may have
    /// been committed one by one.
    async fn surviving(&self, connection: &mut Self::Connection, rows: &[i64]) -> Result<HashSet<i64>, StoreError>;

    /// Takes rows that are due. What that means depends on the mode:
    ///
    /// - single node: they are read, nothing is written;
    /// - multi node: they are leased (`locked_by` = the lock, `locked_at` = `now`). A row whose lease has ended, or that
    ///   lost one before (`lease_losses` > 0), is a *suspect*: it may have crashed the process that held it. Suspects are
    ///   taken only where `suspects` allows, only when the first row in the order is one, and nothing else with them: up
    ///   to [`SUSPECT_GROUP`] rows that lost one lease together, a row that lost more alone. Taking over an ended lease
    ///   adds one to `lease_losses` if it was the first, or if its lock ends with [`STARTED`](super::STARTED): else no
    ///   delivery can have caused the loss. A row with [`DEAD_AFTER_LOSSES`] becomes DEAD with the error of
    ///   [`lease_lost_error`], and is answered as dead;
    /// - ordered: as multi node, but by key, see [`choose_runs`]. Rows that were met and not chosen are *parked*: later
    ///   calls do not meet them again until a row before them is finished, when some behind it are unparked.
    ///
    /// A lease has ended when it is as old as a lease is long. A lease that began in the future by more than a tenth of
    /// its length has ended too: the clock was set back, and nobody knows when it began.
    ///
    /// All rows of a claim together weigh at most [`MAX_CLAIM_BYTES`], but for one that is larger alone. An error of kind
    /// [`OutcomeUnknown`](crate::FaultKind::OutcomeUnknown) means that rows may have been leased.
    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, StoreError>;

    /// Suspects that were just taken are about to be delivered: replaces their lock by one that ends with
    /// [`STARTED`](super::STARTED), where they are still leased by it, and answers with those rows.
    async fn mark_started(&self, lock: &str, started: &str, rows: &[i64]) -> Result<HashSet<i64>, StoreError>;

    /// How long until the first pending row is due that is not left out, not leased, not parked, and no suspect where
    /// `wanted.suspects` is false; or, where it is true, until the first lease ends of a row that is not left out. Limit,
    /// position and lock are ignored.
    async fn next_due(&self, wanted: &Wanted<'_>) -> Result<Option<Duration>, StoreError>;

    /// Carries out those changes whose fence still stands and whose row is pending. All in one transaction. `fences` are,
    /// single node: `owner:generation` of those under which the rows were claimed; else: the locks of the rows.
    ///
    /// A changed row is no longer leased. DONE and DEAD set `done_at`; a wait sets `available_at` to `now` + wait; what is
    /// neither DONE nor DEAD loses its `lease_losses`, because an attempt came to its end.
    ///
    /// It MUST NOT wait for a row that another transaction has locked: such rows are left alone and answered as locked.
    async fn record(&self, fences: &[String], changes: &[Change]) -> Result<Changed, StoreError>;

    /// Starts the leases of these rows anew where one of these locks still holds them. It MUST NOT wait for a locked row.
    async fn renew(&self, locks: &[String], rows: &[i64]) -> Result<Changed, StoreError>;

    /// Ends leases without a trace where one of the locks still holds them. Answers with the rows that are known to exist
    /// now, released or not.
    async fn release(&self, leases: &Leases<'_>) -> Result<HashSet<i64>, StoreError>;

    /// True if statements may run on a thread and a runtime of their own, where no listener can delay them. False for a
    /// store on the clock of a test.
    fn runs_on_own_thread(&self) -> bool;

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

/// Which leases are to end.
#[derive(Clone, Copy, Debug)]
pub enum Leases<'a> {
    /// Those of these rows.
    OfRows {
        /// The locks that may hold them.
        locks: &'a [String],
        /// Their numbers.
        rows: &'a [i64],
    },
    /// Those of the rows of these events.
    OfEvents {
        /// The locks that may hold them.
        locks: &'a [String],
        /// The ids of the events.
        ids: &'a [String],
    },
    /// All that these locks hold, as far as they are found among the first [`FOUND_AMONG`] rows that are due.
    OfClaims {
        /// The locks in question.
        locks: &'a [String],
    },
}

/// What became of rows that were to be changed; those that are in neither set are no longer leased by the locks that were
/// given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// They were changed.
    pub rows: HashSet<i64>,
    /// They are still leased by one of the locks, but another transaction has locked them: nothing was changed.
    pub locked: HashSet<i64>,
}

impl Changed {
    /// What became of one row.
    pub fn answer(&self, row: i64) -> Settled {
        match (self.rows.contains(&row), self.locked.contains(&row)) {
            (true, _) => Settled::Applied,
            (false, true) => Settled::Locked,
            (false, false) => Settled::LostLease,
        }
    }
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
    /// Ordered: rows were met that wait for one that another transaction has locked.
    pub is_held_up: bool,
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
    /// How many leases it lost, with the one that is taken over now.
    pub losses: u32,
    /// What its payload weighs.
    pub bytes: usize,
}

impl Met {
    fn is_suspect(&self) -> bool {
        self.losses > 0
    }

    /// Nothing of its key stands before it.
    fn is_head(&self) -> bool {
        self.key.is_none() || self.predecessor.is_none()
    }
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
/// When the first row is a suspect and the head of its key, only suspects are taken: see [`Store::take`]. Else neither a
/// suspect nor what stands behind it is taken or parked now.
pub fn choose_runs(met: &[Met]) -> Chosen {
    if let Some(first) = met.first().filter(|first| first.is_suspect() && first.is_head()) {
        let group = met.iter().filter(|row| row.losses == 1 && row.is_head()).take(SUSPECT_GROUP);
        let taken = match first.losses {
            1 => group.map(|row| row.position.seq).collect(),
            _ => vec![first.position.seq],
        };
        return Chosen { taken, ..Chosen::default() };
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
                _ if row.is_suspect() => {}
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
            goes_on &= !row.is_suspect() && row.predecessor == last;
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
        Met { position: Position { due: 0, seq }, key, predecessor, losses: 0, bytes: 1 }
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
    fn a_row_that_lost_two_leases_is_taken_alone_and_only_first() {
        let mut rows = [met(1, "a", None), met(2, "a", Some(1)), met(3, "b", None)];
        rows[0].losses = 2;
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![1], ..Chosen::default() });
        rows.rotate_right(1);
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![3], parked: vec![(2, 1)], is_cut: false });
    }

    #[test]
    fn rows_that_lost_one_lease_are_taken_in_groups_and_nothing_else_with_them() {
        let mut rows: Vec<Met> = (0..300).map(|seq| met(seq, "", None)).collect();
        for (place, row) in rows.iter_mut().enumerate() {
            row.losses = [1, 0, 2][place % 3];
        }
        let taken = choose_runs(&rows).taken;
        assert_eq!(taken, (0..300).step_by(3).collect::<Vec<i64>>());
        assert_eq!(taken.len(), SUSPECT_GROUP);
        let of_one_key = [met(1, "a", None), met(2, "a", Some(1))].map(|row| Met { losses: 1, ..row });
        assert_eq!(choose_runs(&of_one_key).taken, [1], "what stands behind a suspect waits for it");
    }

    #[test]
    fn a_claim_is_bounded_in_bytes_but_for_one_row() {
        let mut rows = [met(1, "a", None), met(2, "a", Some(1)), met(3, "", None)];
        rows[0].bytes = MAX_CLAIM_BYTES + 1;
        assert_eq!(choose_runs(&rows), Chosen { taken: vec![1], parked: vec![], is_cut: true });
    }
}

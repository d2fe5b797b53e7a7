use std::path::PathBuf;
use std::time::Duration;

use posthaste_core::metric_names::SQLITE_WAL_BYTES;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use tokio::time::Instant;

use super::writer_lock::BUSY_TIMEOUT;

/// The size in bytes above which the WAL is emptied. It grows further only while a reader stays for longer than an
/// attempt waits.
pub const WAL_LIMIT: u64 = 32 * 1024 * 1024;

/// How long the writer, and with it every write, waits for readers to leave the WAL. Ours read for a few milliseconds,
/// but for longer on a busy machine, so the next attempt after one in vain waits twice as long.
const PATIENCE: Duration = Duration::from_millis(50);
/// The pause after an attempt in vain, in multiples of the time that it waited.
const PAUSE: u32 = 20;
/// A busy writer adds much during a pause, so the next attempt is made earlier if the WAL has grown by this part of its
/// size. After another attempt in vain the part is twice as large, so that a reader that stays causes few attempts.
const GROWTH: u64 = 8;
/// Patience and growth double this often.
const DOUBLINGS: u32 = 3;
/// The pause after an attempt that failed, such as on a full disk.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(30);
/// A WAL of this size means that a reader stays for long. The log says so.
const WARN_ABOVE: u64 = 8 * WAL_LIMIT;

/// Keeps the WAL of a file small.
///
/// SQLite itself copies commits from the WAL to the database file, and begins the WAL anew when no reader uses it.
/// While reads overlap there is always one that does, and the WAL grows without end. A checkpoint by the writer waits
/// for the readers in the WAL, and readers that begin meanwhile read the database file.
pub(super) struct Wal {
    file: PathBuf,
    /// The name of the database in metrics.
    database: String,
    size: u64,
    attempts: Attempts,
    has_warned: bool,
}

/// When to try to empty a WAL that is above the limit.
#[derive(Default)]
struct Attempts {
    /// How many attempts in a row were in vain.
    in_vain: u32,
    /// After an attempt in vain or a failed one: no attempt before this time, or before the WAL has this size.
    wait: Option<(Instant, u64)>,
}

impl Attempts {
    fn is_due(&self, size: u64, now: Instant) -> bool {
        size > WAL_LIMIT && self.wait.is_none_or(|(until, until_size)| now >= until || size >= until_size)
    }

    fn patience(&self) -> Duration {
        PATIENCE * (1 << self.in_vain.min(DOUBLINGS))
    }

    /// The WAL is empty now.
    fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// Readers did not leave the WAL in time.
    fn was_in_vain(&mut self, size: u64, now: Instant) {
        let growth = (size / GROWTH) << self.in_vain.min(DOUBLINGS);
        self.wait = Some((now + self.patience() * PAUSE, size + growth));
        self.in_vain += 1;
    }

    fn failed(&mut self, now: Instant) {
        self.wait = Some((now + PAUSE_AFTER_ERROR, u64::MAX));
    }
}

impl Wal {
    /// The WAL of the database of these options.
    pub(super) fn of(options: &SqliteConnectOptions) -> Self {
        let database = options.get_filename();
        let mut file = database.as_os_str().to_owned();
        file.push("-wal");
        let name = database.file_name().unwrap_or(database.as_os_str()).to_string_lossy().into_owned();
        Self { file: file.into(), database: name, size: 0, attempts: Attempts::default(), has_warned: false }
    }

    /// Looks at the size, and empties the WAL if it is above the limit. Called between two transactions of the writer.
    pub(super) async fn limit(&mut self, connection: &mut SqliteConnection) {
        self.measure();
        if !self.attempts.is_due(self.size, Instant::now()) {
            return;
        }
        match truncate(connection, self.attempts.patience()).await {
            Ok(true) => {
                self.attempts.succeeded();
                self.has_warned = false;
            }
            Ok(false) => self.attempts.was_in_vain(self.size, Instant::now()),
            Err(error) => {
                self.attempts.failed(Instant::now());
                tracing::warn!(database = self.database, %error, "failed to empty the WAL; trying again");
            }
        }
        self.measure();
        if self.size > WARN_ABOVE && !self.has_warned {
            self.has_warned = true;
            let (database, bytes) = (&self.database, self.size);
            tracing::warn!(
                database,
                bytes,
                "the WAL grows: a long query or another program keeps reading the database"
            );
        }
    }

    /// When to try again to empty a WAL that is above the limit, if nothing is written; `None` if it is not.
    pub(super) fn next_attempt(&self) -> Option<Instant> {
        let is_above = self.size > WAL_LIMIT;
        is_above.then(|| self.attempts.wait.map_or_else(Instant::now, |(until, _)| until))
    }

    fn measure(&mut self) {
        let size = std::fs::metadata(&self.file).map_or(0, |file| file.len());
        if size != self.size {
            metrics::gauge!(SQLITE_WAL_BYTES, "database" => self.database.clone()).set(size as f64);
        }
        self.size = size;
    }
}

/// True if the WAL is empty now, false if a reader or another writer is in the way.
async fn truncate(connection: &mut SqliteConnection, patience: Duration) -> Result<bool, sqlx::Error> {
    set_busy_timeout(connection, patience).await?;
    let truncated = sqlx::query_as("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut *connection).await;
    set_busy_timeout(connection, BUSY_TIMEOUT).await?;
    let (busy, _, _): (i64, i64, i64) = truncated?;
    Ok(busy == 0)
}

async fn set_busy_timeout(connection: &mut SqliteConnection, timeout: Duration) -> Result<(), sqlx::Error> {
    let pragma = format!("PRAGMA busy_timeout = {}", timeout.as_millis());
    sqlx::query(sqlx::AssertSqlSafe(pragma)).execute(connection).await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1024 * 1024;

    /// The sizes in MiB at which attempts are made, and how long each waits, while the WAL grows at this speed and every
    /// attempt is in vain.
    fn in_vain(attempts: &mut Attempts, bytes_per_second: u64, largest: u64) -> Vec<(u64, Duration)> {
        let (mut now, mut size, mut made) = (Instant::now(), 0, Vec::new());
        while size < largest {
            size += bytes_per_second / 100;
            now += Duration::from_millis(10);
            if attempts.is_due(size, now) {
                made.push((size / MIB, attempts.patience()));
                attempts.was_in_vain(size, now);
            }
        }
        made
    }

    #[test]
    fn a_reader_that_stays_causes_few_attempts_however_fast_the_wal_grows() {
        let made = in_vain(&mut Attempts::default(), 100 * MIB, 1_200 * MIB);
        let [a, b, c, d] = [50, 100, 200, 400].map(Duration::from_millis);
        assert_eq!(made, [(33, a), (38, b), (48, c), (72, d), (144, d), (288, d), (576, d), (1_152, d)]);
    }

    #[test]
    fn a_wal_that_grows_slowly_is_tried_again_after_a_pause_and_costs_the_writer_a_twentieth() {
        // 600 s of writing.
        let made = in_vain(&mut Attempts::default(), MIB / 10, 60 * MIB);
        let waited: Duration = made.iter().map(|(_, patience)| *patience).sum();
        assert!(made.len() > 20 && waited < Duration::from_secs(600) / 20, "{waited:?}, {made:?}");
    }

    #[test]
    fn after_a_success_the_limit_is_the_same_as_at_first() {
        let mut attempts = Attempts::default();
        in_vain(&mut attempts, 100 * MIB, 600 * MIB);
        attempts.succeeded();
        let now = Instant::now();
        assert!(!attempts.is_due(WAL_LIMIT, now) && attempts.is_due(WAL_LIMIT + 1, now));
        assert_eq!(attempts.patience(), PATIENCE);
    }

    #[test]
    fn a_failed_attempt_is_repeated_after_its_pause_only() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        attempts.failed(now);
        assert!(!attempts.is_due(100 * WAL_LIMIT, now) && attempts.is_due(WAL_LIMIT + 1, now + PAUSE_AFTER_ERROR));
    }
}

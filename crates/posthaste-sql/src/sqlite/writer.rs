use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use posthaste_core::metric_names::HUB_TASK_PANICS;
use posthaste_core::{Backoff, heartbeat, panic_message};
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until};

use super::errors::{is_certain, is_locked};
use super::hub_migrations::{self, Direction};
use super::wal::Wal;
use super::writer_lock::{BUSY_TIMEOUT, WriterLock};

/// The maximum number of jobs in one commit, which bounds how long the first of them waits.
const GROUP: usize = 256;

/// How long the writer serves only other jobs after a background job, in multiples of the time that it took: if no other
/// job waits, and if some do. An idle writer may get the next step of an event at any moment.
const REST: u32 = 1;
const REST_WHEN_BUSY: u32 = 2;
/// At most this long: a job may have waited for a file that another process had locked.
const LONGEST_REST: Duration = Duration::from_millis(200);

/// The pause before the writer reconnects.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The only connection that writes, with a queue of jobs. Jobs that wait together commit together.
///
/// Background jobs have their own queue. They are many and long when endpoints are bad, and must not delay the others:
/// they run one by one, with pauses between them.
#[derive(Clone)]
pub(super) struct Writer {
    queue: mpsc::Sender<Request>,
    background: mpsc::Sender<Box<dyn Job>>,
    is_in_background: bool,
}

enum Request {
    Write(Box<dyn Job>),
    Migrate(Arc<Migrator>, Direction, oneshot::Sender<Result<(), MigrateError>>),
    Close(oneshot::Sender<()>),
}

/// The ends of the queues at which the writer reads.
struct Queues {
    requests: mpsc::Receiver<Request>,
    background: mpsc::Receiver<Box<dyn Job>>,
}

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// The job was not committed.
    #[error(transparent)]
    Undone(sqlx::Error),
    /// The job may be committed: the commit failed on its way to the disk, or its result was lost.
    #[error(transparent)]
    Unknown(sqlx::Error),
}

trait Job: Send {
    fn run<'a>(&'a mut self, connection: &'a mut SqliteConnection) -> BoxFuture<'a, Result<(), sqlx::Error>>;
    /// Sends the result to the caller. Called once, after the transaction's end, with `Err` if it did not commit.
    fn answer(self: Box<Self>, committed: Result<(), WriteError>);
}

struct Pending<T, F> {
    job: F,
    value: Option<T>,
    reply: oneshot::Sender<Result<T, WriteError>>,
}

impl<T, F> Job for Pending<T, F>
where
    T: Send + 'static,
    F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync,
{
    fn run<'a>(&'a mut self, connection: &'a mut SqliteConnection) -> BoxFuture<'a, Result<(), sqlx::Error>> {
        Box::pin(async move {
            self.value = Some((self.job)(connection).await?);
            Ok(())
        })
    }

    fn answer(self: Box<Self>, committed: Result<(), WriteError>) {
        let answer = match (committed, self.value) {
            (Ok(()), Some(value)) => Ok(value),
            (Ok(()), None) => Err(WriteError::Unknown(sqlx::Error::WorkerCrashed)),
            (Err(error), _) => Err(error),
        };
        // The caller may have stopped waiting. The write has committed all the same.
        let _ = self.reply.send(answer);
    }
}

impl Writer {
    /// Starts the writer. Also returns the lock that the writer acquires before each transaction.
    pub(super) async fn start(options: &SqliteConnectOptions) -> Result<(Self, WriterLock), sqlx::Error> {
        let connection = connect(options).await?;
        let writer_lock = WriterLock::of(options.get_filename());
        let (queue, requests) = mpsc::channel(4 * GROUP);
        let (background, background_jobs) = mpsc::channel(4 * GROUP);
        let queues = Queues { requests, background: background_jobs };
        // The writer has its own thread, so that renewals, which are writes, run while listeners block the service's
        // runtime.
        heartbeat::runtime().spawn(keep_serving(connection, options.clone(), writer_lock.clone(), queues));
        Ok((Self { queue, background, is_in_background: false }, writer_lock))
    }

    /// The same writer, for background jobs.
    pub(super) fn in_background(&self) -> Self {
        Self { is_in_background: true, ..self.clone() }
    }

    pub(super) async fn write<T, F>(&self, job: F) -> Result<T, WriteError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Pending { job, value: None, reply });
        let sent = match self.is_in_background {
            true => self.background.send(job).await.is_ok(),
            false => self.queue.send(Request::Write(job)).await.is_ok(),
        };
        if !sent {
            return Err(WriteError::Undone(sqlx::Error::PoolClosed));
        }
        // The writer sends a result for every job, also during a close. Without a result, the writer panicked at this
        // job.
        answer.await.map_err(|_| WriteError::Unknown(sqlx::Error::WorkerCrashed))?
    }

    pub(super) async fn migrate(&self, migrator: Arc<Migrator>, direction: Direction) -> Result<(), MigrateError> {
        let closed = || MigrateError::Execute(sqlx::Error::PoolClosed);
        let (reply, answer) = oneshot::channel();
        self.queue.send(Request::Migrate(migrator, direction, reply)).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    pub(super) async fn close(&self) {
        let (reply, answer) = oneshot::channel();
        if self.queue.send(Request::Close(reply)).await.is_ok() {
            let _ = answer.await;
        }
    }
}

/// Retries while the file is locked. If several processes open a new file at once, only one can switch it to WAL.
/// SQLite returns "locked" to the others at once, in spite of their busy timeout.
async fn connect(options: &SqliteConnectOptions) -> Result<SqliteConnection, sqlx::Error> {
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match options.connect().await {
            Err(error) if is_locked(&error) && Instant::now() < deadline => sleep(Duration::from_millis(10)).await,
            connected => return connected,
        }
    }
}

/// Restarts the writer with a new connection after a panic, because the state of the old one is unknown.
async fn keep_serving(
    first: SqliteConnection,
    options: SqliteConnectOptions,
    writer_lock: WriterLock,
    mut queues: Queues,
) {
    let mut connection = first;
    loop {
        let wal = Wal::of(&options);
        let serving = AssertUnwindSafe(serve(connection, writer_lock.clone(), wal, &mut queues)).catch_unwind();
        let Err(panic) = serving.await else { return };
        metrics::counter!(HUB_TASK_PANICS, "task" => "sqlite-writer").increment(1);
        tracing::error!(panic = panic_message(&*panic), "the SQLite writer panicked and reconnects");
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        connection = loop {
            // The pause keeps repeated panics or refusals from using all CPU.
            sleep(backoff.next_pause()).await;
            match connect(&options).await {
                Ok(connection) => break connection,
                Err(error) => tracing::error!(%error, "the SQLite writer failed to reconnect; trying again"),
            }
        };
    }
}

async fn serve(mut connection: SqliteConnection, writer_lock: WriterLock, mut wal: Wal, queues: &mut Queues) {
    let Queues { requests, background } = queues;
    // An earlier process may have left a large one.
    wal.limit(&mut connection).await;
    // When the next background job may run.
    let mut rested = Instant::now();
    loop {
        let next_attempt = wal.next_attempt().filter(|_| !requests.is_closed());
        let mut next = tokio::select! {
            biased;
            Some(request) = requests.recv() => Some(request),
            Some(job) = rested_job(background, rested) => {
                let _permit = writer_lock.acquire(BUSY_TIMEOUT).await;
                rested = write_in_background(&mut connection, job, REST).await;
                wal.limit(&mut connection).await;
                continue;
            }
            () = sleep_until(next_attempt.unwrap_or(rested)), if next_attempt.is_some() => {
                let _permit = writer_lock.acquire(BUSY_TIMEOUT).await;
                wal.limit(&mut connection).await;
                continue;
            }
            else => return,
        };
        // If the wait times out, a transaction of the service still has the writer lock and the lock of the file. The
        // next statement then fails with "busy".
        let _permit = writer_lock.acquire(BUSY_TIMEOUT).await;
        let mut group = Vec::new();
        let mut last = None;
        while let Some(request) = next.take() {
            match request {
                Request::Write(job) => group.push(job),
                other => last = Some(other),
            }
            if last.is_none() && group.len() < GROUP {
                next = requests.try_recv().ok();
            }
        }
        write_group(&mut connection, group).await;
        // The background makes progress however many others there are.
        if Instant::now() >= rested
            && let Ok(job) = background.try_recv()
        {
            rested = write_in_background(&mut connection, job, REST_WHEN_BUSY).await;
        }
        wal.limit(&mut connection).await;
        match last {
            Some(Request::Migrate(migrator, direction, reply)) => {
                let _ = reply.send(migrate(&mut connection, &migrator, direction).await);
            }
            Some(Request::Close(reply)) => {
                close(connection, requests, background).await;
                let _ = reply.send(());
                return;
            }
            _ => {}
        }
    }
}

/// The next background job, not before this time.
async fn rested_job(background: &mut mpsc::Receiver<Box<dyn Job>>, rested: Instant) -> Option<Box<dyn Job>> {
    sleep_until(rested).await;
    background.recv().await
}

/// Runs a background job, and returns when the next one may run: after a multiple of the time that this one took.
async fn write_in_background(connection: &mut SqliteConnection, job: Box<dyn Job>, rest: u32) -> Instant {
    let began = Instant::now();
    write_group(connection, vec![job]).await;
    let ended = Instant::now();
    ended + ((ended - began) * rest).min(LONGEST_REST)
}

/// Finishes the background jobs that were sent before the close, and refuses all others.
async fn close(
    mut connection: SqliteConnection,
    requests: &mut mpsc::Receiver<Request>,
    background: &mut mpsc::Receiver<Box<dyn Job>>,
) {
    requests.close();
    background.close();
    while let Some(job) = background.recv().await {
        write_group(&mut connection, vec![job]).await;
    }
    while let Some(request) = requests.recv().await {
        if let Request::Write(job) = request {
            job.answer(Err(WriteError::Undone(sqlx::Error::PoolClosed)));
        }
    }
    let _ = connection.close().await;
}

/// Migrates in one transaction, so that two processes do not migrate the same table at the same time.
async fn migrate(
    connection: &mut SqliteConnection,
    migrator: &Migrator,
    direction: Direction,
) -> Result<(), MigrateError> {
    let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
    hub_migrations::migrate(&mut transaction, migrator, direction).await?;
    Ok(transaction.commit().await?)
}

async fn write_group(connection: &mut SqliteConnection, mut group: Vec<Box<dyn Job>>) {
    if group.is_empty() {
        return;
    }
    if let Err(error) = begin(connection).await {
        return refuse(group, &error);
    }
    match run_and_commit(connection, &mut group).await {
        Ok(()) => group.into_iter().for_each(|job| job.answer(Ok(()))),
        Err(error) if group.len() == 1 => group.remove(0).answer(Err(error)),
        // Not repeated: the group may have committed.
        Err(WriteError::Unknown(error)) => {
            let reason = error.to_string();
            group.into_iter().for_each(|job| job.answer(Err(WriteError::Unknown(shared(&reason)))));
        }
        Err(WriteError::Undone(_)) => write_one_by_one(connection, group).await,
    }
}

async fn write_one_by_one(connection: &mut SqliteConnection, group: Vec<Box<dyn Job>>) {
    let mut group = group.into_iter();
    while let Some(job) = group.next() {
        if let Err(error) = begin(connection).await {
            // The file is locked: each other job would wait just as long, so all fail now.
            return refuse([job].into_iter().chain(group), &error);
        }
        let mut alone = [job];
        let committed = run_and_commit(connection, &mut alone).await;
        let [job] = alone;
        job.answer(committed);
    }
}

/// Fails all jobs with the same reason. None of them was begun.
fn refuse(group: impl IntoIterator<Item = Box<dyn Job>>, reason: &sqlx::Error) {
    let reason = reason.to_string();
    group.into_iter().for_each(|job| job.answer(Err(WriteError::Undone(shared(&reason)))));
}

/// An error with this text. Errors of the driver cannot be cloned for several jobs.
fn shared(reason: &str) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::WouldBlock, reason.to_owned()))
}

/// IMMEDIATE acquires the lock now, where SQLite waits for other processes, and not at the first write.
async fn begin(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("BEGIN IMMEDIATE").execute(connection).await.map(|_| ())
}

async fn run_and_commit(connection: &mut SqliteConnection, group: &mut [Box<dyn Job>]) -> Result<(), WriteError> {
    let result = match run_all(connection, group).await {
        Ok(()) => commit(connection).await,
        Err(error) => Err(WriteError::Undone(error)),
    };
    if result.is_err() {
        // If the error has already ended the transaction, the rollback fails, which is harmless.
        let _ = sqlx::query("ROLLBACK").execute(connection).await;
    }
    result
}

async fn run_all(connection: &mut SqliteConnection, group: &mut [Box<dyn Job>]) -> Result<(), sqlx::Error> {
    for job in group {
        // A panic of one job must not end this task, which is the only writer of the file. The caller rolls the
        // transaction back, and with it the unfinished work of the job.
        match AssertUnwindSafe(job.run(connection)).catch_unwind().await {
            Ok(done) => done?,
            Err(panic) => return Err(sqlx::Error::Protocol(format!("the write panicked: {}", panic_message(&*panic)))),
        }
    }
    Ok(())
}

async fn commit(connection: &mut SqliteConnection) -> Result<(), WriteError> {
    let committed = sqlx::query("COMMIT").execute(connection).await;
    committed.map(|_| ()).map_err(|error| match is_certain(&error) {
        true => WriteError::Undone(error),
        false => WriteError::Unknown(error),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_util::future::join_all;
    use tempfile::TempDir;
    use tokio::sync::{Mutex, Notify};

    use super::*;

    async fn start() -> (TempDir, SqliteConnectOptions, Writer) {
        let folder = tempfile::tempdir().unwrap();
        let options = SqliteConnectOptions::new().filename(folder.path().join("test.db")).create_if_missing(true);
        let options = options.busy_timeout(Duration::from_millis(50));
        let (writer, _) = Writer::start(&options).await.unwrap();
        writer.write(|connection| Box::pin(run(connection, "CREATE TABLE t (n)"))).await.unwrap();
        (folder, options, writer)
    }

    async fn run(connection: &mut SqliteConnection, sql: &'static str) -> Result<(), sqlx::Error> {
        sqlx::query(sql).execute(connection).await.map(|_| ())
    }

    async fn count(writer: &Writer) -> i64 {
        const COUNT: &str = "SELECT count(*) FROM t";
        writer.write(|connection| Box::pin(sqlx::query_scalar(COUNT).fetch_one(connection))).await.unwrap()
    }

    #[tokio::test]
    async fn a_job_that_panics_fails_alone() {
        let (_folder, _, writer) = start().await;
        let gate = busy(&writer).await;
        let results = join_all((0..5).map(|number| {
            writer.write(move |connection| {
                Box::pin(async move {
                    run(connection, "INSERT INTO t VALUES (1)").await?;
                    assert!(number != 2, "job {number} is broken");
                    Ok(number)
                })
            })
        }));
        // Each job is queued at its first poll, and the gate opens after that. So all jobs are in one group.
        let (results, ()) = tokio::join!(results, async { gate.notify_one() });
        for (number, answer) in results.into_iter().enumerate() {
            match answer {
                Ok(value) => assert_eq!(value, number),
                Err(error) => assert!(number == 2 && error.to_string().ends_with("job 2 is broken"), "{error}"),
            }
        }
        assert_eq!(count(&writer).await, 4, "what it did is undone");
        let before_it_waits = writer.write::<(), _>(|_| panic!("at once"));
        assert!(before_it_waits.await.unwrap_err().to_string().ends_with("at once"));
        assert_eq!(count(&writer).await, 4, "the writer lives");
    }

    /// A job that panics in `answer`, where the writer does not catch panics.
    struct Poison(Option<oneshot::Sender<()>>);

    impl Job for Poison {
        fn run<'a>(&'a mut self, connection: &'a mut SqliteConnection) -> BoxFuture<'a, Result<(), sqlx::Error>> {
            Box::pin(run(connection, "INSERT INTO t VALUES (1)"))
        }

        fn answer(mut self: Box<Self>, _: Result<(), WriteError>) {
            self.0.take().unwrap().send(()).unwrap();
            panic!("sending the result fails");
        }
    }

    #[tokio::test]
    async fn a_writer_that_panics_continues_with_a_new_connection() {
        let (_folder, _, writer) = start().await;
        let (answering, answered) = oneshot::channel();
        assert!(writer.queue.send(Request::Write(Box::new(Poison(Some(answering))))).await.is_ok());
        // A job that is sent earlier could be in the same group.
        answered.await.unwrap();
        assert_eq!(count(&writer).await, 1, "the commit is kept, and the writer serves requests again");
        writer.write(|connection| Box::pin(run(connection, "INSERT INTO t VALUES (1)"))).await.unwrap();
        assert_eq!(count(&writer).await, 2);
    }

    /// Keeps the writer busy until the gate opens, so that jobs that are queued meanwhile form one group.
    async fn busy(writer: &Writer) -> Arc<Notify> {
        let (started, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (writer, starting, waiting) = (writer.clone(), started.clone(), gate.clone());
        tokio::spawn(async move {
            let job = writer.write(move |_| {
                let (starting, waiting) = (starting.clone(), waiting.clone());
                Box::pin(async move {
                    starting.notify_one();
                    waiting.notified().await;
                    Ok(())
                })
            });
            job.await.unwrap();
        });
        started.notified().await;
        gate
    }

    /// A job that writes its name into the list when it runs.
    fn noted(
        list: &Arc<std::sync::Mutex<Vec<String>>>,
        name: String,
    ) -> impl for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync + 'static
    {
        let list = list.clone();
        move |_| {
            list.lock().unwrap().push(name.clone());
            Box::pin(async { Ok(()) })
        }
    }

    #[tokio::test]
    async fn one_background_job_runs_after_each_group_and_all_run_before_a_close() {
        let (_folder, _, writer) = start().await;
        let list = Arc::new(std::sync::Mutex::new(Vec::new()));
        let gate = busy(&writer).await;
        let later = writer.in_background();
        let background = join_all((0..3).map(|number| later.write(noted(&list, format!("background {number}")))));
        let normal = join_all((0..3).map(|number| writer.write(noted(&list, format!("normal {number}")))));
        let (background, normal, ()) = tokio::join!(background, normal, async { gate.notify_one() });
        assert!(background.iter().chain(&normal).all(Result::is_ok));
        let order = ["background 0", "normal 0", "normal 1", "normal 2", "background 1", "background 2"];
        assert_eq!(*list.lock().unwrap(), order);

        let gate = busy(&writer).await;
        let background = join_all((3..6).map(|number| later.write(noted(&list, number.to_string()))));
        let (background, (), ()) = tokio::join!(background, writer.close(), async { gate.notify_one() });
        assert!(background.iter().all(Result::is_ok));
        assert_eq!(list.lock().unwrap()[6..], ["3", "4", "5"]);
        let late = later.write(noted(&list, "late".to_owned())).await;
        assert!(matches!(late, Err(WriteError::Undone(sqlx::Error::PoolClosed))));
    }

    #[tokio::test]
    async fn a_group_waits_for_a_locked_file_once_and_not_once_per_job() {
        let (_folder, options, writer) = start().await;
        let (other, runs) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let jobs = (0..4).map(|number| {
            let (other, runs, options) = (other.clone(), runs.clone(), options.clone());
            let taker = other.clone();
            let write = writer.write(move |connection| {
                let (taker, runs, options) = (taker.clone(), runs.clone(), options.clone());
                Box::pin(async move {
                    runs.fetch_add(1, Ordering::Relaxed);
                    if number == 3 {
                        // Another process locks the file after the group has failed and before its jobs are repeated.
                        run(connection, "ROLLBACK").await?;
                        let mut thief = options.connect().await?;
                        begin(&mut thief).await?;
                        *taker.lock().await = Some(thief);
                        return Err(sqlx::Error::RowNotFound);
                    }
                    run(connection, "INSERT INTO t VALUES (1)").await
                })
            });
            async move {
                let answer = write.await;
                // The first result unlocks the file, so a second attempt would succeed.
                if let Some(thief) = other.lock().await.take() {
                    thief.close().await.unwrap();
                }
                answer
            }
        });
        let gate = busy(&writer).await;
        // Each job is queued at its first poll, and the gate opens after that. So all jobs are in one group.
        let (results, ()) = tokio::join!(join_all(jobs), async { gate.notify_one() });
        assert!(
            results.iter().all(|answer| matches!(answer, Err(WriteError::Undone(sqlx::Error::Io(_))))),
            "{results:?}"
        );
        assert_eq!(runs.load(Ordering::Relaxed), 4, "each ran in the group and not again");
        assert_eq!(count(&writer).await, 0);
    }
}

use futures_util::future::BoxFuture;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection};
use tokio::sync::{mpsc, oneshot};

/// How many jobs share one commit at most: bounds how long the first of them waits.
const GROUP: usize = 256;

/// The one connection that writes, behind a queue. Jobs that wait together commit together.
#[derive(Clone)]
pub(super) struct Writer {
    queue: mpsc::Sender<Request>,
}

enum Request {
    Write(Box<dyn Job>),
    Migrate(Migrator, oneshot::Sender<Result<(), MigrateError>>),
    Close(oneshot::Sender<()>),
}

trait Job: Send {
    fn run<'a>(&'a mut self, connection: &'a mut SqliteConnection) -> BoxFuture<'a, Result<(), sqlx::Error>>;
    /// Called once, after the transaction's end: `Err` when it did not commit.
    fn answer(self: Box<Self>, committed: Result<(), sqlx::Error>);
}

struct Pending<T, F> {
    job: F,
    value: Option<T>,
    reply: oneshot::Sender<Result<T, sqlx::Error>>,
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

    fn answer(self: Box<Self>, committed: Result<(), sqlx::Error>) {
        let answer = match (committed, self.value) {
            (Ok(()), Some(value)) => Ok(value),
            (Ok(()), None) => Err(sqlx::Error::WorkerCrashed),
            (Err(error), _) => Err(error),
        };
        // Whoever asked may have gone; the write stands all the same.
        let _ = self.reply.send(answer);
    }
}

impl Writer {
    pub(super) async fn start(options: &SqliteConnectOptions) -> Result<Self, sqlx::Error> {
        let connection = options.connect().await?;
        let (queue, requests) = mpsc::channel(4 * GROUP);
        tokio::spawn(serve(connection, requests));
        Ok(Self { queue })
    }

    pub(super) async fn write<T, F>(&self, job: F) -> Result<T, sqlx::Error>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Pending { job, value: None, reply });
        self.queue.send(Request::Write(job)).await.map_err(|_| sqlx::Error::PoolClosed)?;
        answer.await.map_err(|_| sqlx::Error::PoolClosed)?
    }

    pub(super) async fn migrate(&self, migrator: Migrator) -> Result<(), MigrateError> {
        let closed = || MigrateError::Execute(sqlx::Error::PoolClosed);
        let (reply, answer) = oneshot::channel();
        self.queue.send(Request::Migrate(migrator, reply)).await.map_err(|_| closed())?;
        answer.await.map_err(|_| closed())?
    }

    pub(super) async fn close(&self) {
        let (reply, answer) = oneshot::channel();
        if self.queue.send(Request::Close(reply)).await.is_ok() {
            let _ = answer.await;
        }
    }
}

async fn serve(mut connection: SqliteConnection, mut requests: mpsc::Receiver<Request>) {
    while let Some(request) = requests.recv().await {
        let mut group = Vec::new();
        let mut next = Some(request);
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
        match last {
            Some(Request::Migrate(migrator, reply)) => {
                let _ = reply.send(migrator.run_direct(None, &mut connection, false).await);
            }
            Some(Request::Close(reply)) => {
                requests.close();
                let _ = connection.close().await;
                let _ = reply.send(());
                return;
            }
            _ => {}
        }
    }
}

async fn write_group(connection: &mut SqliteConnection, mut group: Vec<Box<dyn Job>>) {
    if group.is_empty() {
        return;
    }
    if let Err(error) = begin(connection).await {
        let text = error.to_string();
        for job in group {
            job.answer(Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::WouldBlock, text.clone()))));
        }
        return;
    }
    match run_and_commit(connection, &mut group).await {
        Ok(()) => group.into_iter().for_each(|job| job.answer(Ok(()))),
        Err(error) if group.len() == 1 => group.remove(0).answer(Err(error)),
        Err(_) => {
            for job in group {
                write_alone(connection, job).await;
            }
        }
    }
}

async fn write_alone(connection: &mut SqliteConnection, job: Box<dyn Job>) {
    let mut alone = [job];
    let committed = match begin(connection).await {
        Ok(()) => run_and_commit(connection, &mut alone).await,
        Err(error) => Err(error),
    };
    let [job] = alone;
    job.answer(committed);
}

/// IMMEDIATE takes the lock now, where waiting for another process is allowed, and not at the first write.
async fn begin(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("BEGIN IMMEDIATE").execute(connection).await.map(|_| ())
}

async fn run_and_commit(connection: &mut SqliteConnection, group: &mut [Box<dyn Job>]) -> Result<(), sqlx::Error> {
    let result = run_all(connection, group).await;
    if result.is_err() {
        // When the error has already ended the transaction there is nothing to roll back.
        let _ = sqlx::query("ROLLBACK").execute(connection).await;
    }
    result
}

async fn run_all(connection: &mut SqliteConnection, group: &mut [Box<dyn Job>]) -> Result<(), sqlx::Error> {
    for job in group {
        job.run(connection).await?;
    }
    sqlx::query("COMMIT").execute(connection).await.map(|_| ())
}

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::{LogStore, Subscriptions};
use crate::wakeup::{LISTEN_PAUSE, NOTIFY_PAUSE, NOTIFY_TIMEOUT};
use crate::{StoreError, Wakeup, lock};

/// Notifies other processes of appends, through the database. Notifications are hints: without them, or when one is
/// lost, consumers poll.
#[async_trait]
pub trait AppendNotifier: Send + Sync {
    /// Notifies the processes that listen of appends to these topics. Never part of an append.
    async fn notify(&self, topics: &[Arc<str>]) -> Result<(), StoreError>;

    /// Calls `appended` with the topics of each notification, until the future is dropped. It calls it with `None` if
    /// the topics are unknown: when it begins to listen, and when notifications may have been lost. An error means that
    /// notifications were lost.
    async fn listen(&self, appended: &(dyn Fn(Option<Vec<String>>) + Send + Sync)) -> Result<(), StoreError>;
}

/// The tasks of one log that notify other processes and listen to them. They end when the log is dropped.
#[derive(Default)]
pub(super) struct Notifications {
    unsent: Arc<Unsent>,
    notifying: OnceLock<AbortHandle>,
    listening: OnceLock<AbortHandle>,
    /// Ends both tasks when it is dropped.
    tasks: Mutex<JoinSet<()>>,
}

/// The topics of appends of which other processes are not notified yet.
#[derive(Default)]
struct Unsent {
    topics: Mutex<BTreeSet<Arc<str>>>,
    wakeup: Wakeup,
}

impl Notifications {
    /// Other processes will be notified of appends to these topics. The first call starts the task that does so.
    pub(super) fn appended<S: LogStore>(&self, store: &Arc<S>, topics: BTreeSet<Arc<str>>) {
        if store.notifier().is_none() {
            return;
        }
        lock(&self.unsent.topics).extend(topics);
        self.unsent.wakeup.wake();
        let task = || notify_when_appended(Arc::clone(store), Arc::clone(&self.unsent));
        self.notifying.get_or_init(|| lock(&self.tasks).spawn(task()));
    }

    /// Wakes the consumers of this process when other processes append. The first call starts the task that listens,
    /// with one connection for all consumers.
    pub(super) fn listen<S: LogStore>(&self, store: &Arc<S>, subscriptions: &Arc<Subscriptions>) {
        if store.notifier().is_some() {
            let task = || listen(Arc::clone(store), Arc::clone(subscriptions));
            self.listening.get_or_init(|| lock(&self.tasks).spawn(task()));
        }
    }
}

/// Notifies other processes, not more often than is useful: one notification has the topics of all appends since the
/// previous one.
async fn notify_when_appended<S: LogStore>(store: Arc<S>, unsent: Arc<Unsent>) {
    loop {
        unsent.wakeup.signalled().await;
        let topics: Vec<Arc<str>> = std::mem::take(&mut *lock(&unsent.topics)).into_iter().collect();
        let Some(notifier) = store.notifier().filter(|_| !topics.is_empty()) else { continue };
        match timeout(NOTIFY_TIMEOUT, notifier.notify(&topics)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(error = error.chain(), "failed to notify other processes of appends: they poll");
            }
            Err(_) => tracing::debug!("notifying other processes of appends took too long: they poll"),
        }
        sleep(NOTIFY_PAUSE).await;
    }
}

async fn listen<S: LogStore>(store: Arc<S>, subscriptions: Arc<Subscriptions>) {
    let appended = |topics: Option<Vec<String>>| match topics {
        Some(topics) => subscriptions.wake_readers_of(topics.iter().map(String::as_str)),
        None => subscriptions.wake_all(),
    };
    while let Some(notifier) = store.notifier() {
        if let Err(error) = notifier.listen(&appended).await {
            tracing::debug!(error = error.chain(), "failed to listen for appends: polling goes on");
        }
        sleep(LISTEN_PAUSE).await;
    }
}

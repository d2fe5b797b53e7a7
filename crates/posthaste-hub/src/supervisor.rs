//! Runs tasks that must run for as long as the hub does.
//!
//! When a task panics, or ends before the hub stops, the supervisor logs it, counts it, and starts the task again after
//! a pause. A task that fails again and again is reported to [`Health`], so that readiness names it.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use posthaste_core::metric_names::HUB_TASK_PANICS;
use posthaste_core::{Backoff, lock, panic_message};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::health::Health;

/// The pause before the first restart; it doubles with each failure in a row.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A task that ran for this long counts as recovered: its failures are forgotten.
const STABLE: Duration = Duration::from_secs(30);
/// After this many failures in a row, a task is reported as failing.
const TOLERATED: u32 = 3;

/// Runs the tasks of a hub and stops them together.
#[derive(Clone, Default)]
pub(crate) struct Supervisor {
    stop: CancellationToken,
    health: Health,
    running: Arc<Mutex<JoinSet<()>>>,
}

impl Supervisor {
    /// Runs the future that `make` returns until the hub stops. If it ends earlier, `make` is called again.
    pub(crate) fn spawn<T>(&self, task: impl Into<Arc<str>>, make: impl FnMut() -> T + Send + 'static)
    where
        T: Future<Output = ()> + Send + 'static,
    {
        let kept = keep(task.into(), self.stop.clone(), self.health.clone(), make);
        lock(&self.running).spawn(kept);
    }

    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    /// Cancelled when the hub stops.
    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.stop
    }

    /// Stops all tasks at the same time and waits until each has ended.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        let mut running = std::mem::take(&mut *lock(&self.running));
        while let Some(ended) = running.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a supervised task panicked or was cancelled");
            }
        }
    }
}

async fn keep<T: Future<Output = ()> + Send>(
    task: Arc<str>,
    stop: CancellationToken,
    health: Health,
    mut make: impl FnMut() -> T + Send,
) {
    let mut failures = 0;
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        // `make` is called inside the future, so that its panics are caught, too.
        let mut running = pin!(AssertUnwindSafe(async { make().await }).catch_unwind());
        let early = tokio::select! {
            biased;
            ended = running.as_mut() => Some(ended),
            () = sleep(STABLE), if failures > 0 => None,
        };
        let ended = match early {
            Some(ended) => ended,
            None => {
                failures = 0;
                backoff.reset();
                health.up(&task);
                running.await
            }
        };
        if stop.is_cancelled() {
            return;
        }
        failures += 1;
        let reason = match ended {
            Ok(()) => "it ended before the hub stopped".to_owned(),
            Err(panic) => {
                metrics::counter!(HUB_TASK_PANICS, "task" => task.to_string()).increment(1);
                format!("it panicked: {}", panic_message(&*panic))
            }
        };
        let pause = backoff.next_pause();
        tracing::error!(task = &*task, reason, failures, ?pause, "a task failed and restarts after the pause");
        if failures >= TOLERATED {
            health.down(&task, format!("failed {failures} times in a row: {reason}"));
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A task that panics at its first `times` starts, and then runs until the stop.
    fn failing(supervisor: &Supervisor, times: u32) -> Arc<AtomicU32> {
        let starts = Arc::new(AtomicU32::new(0));
        let (counted, stop) = (starts.clone(), supervisor.stopping().clone());
        supervisor.spawn("task", move || {
            let (start, stop) = (counted.fetch_add(1, Ordering::Relaxed) + 1, stop.clone());
            async move {
                assert!(start > times, "start number {start}");
                stop.cancelled().await;
            }
        });
        starts
    }

    async fn until(what: &str, mut holds: impl FnMut() -> bool) {
        for _ in 0..100_000 {
            if holds() {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("timed out waiting until {what}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_restarts_after_a_panic_and_one_panic_is_not_reported() {
        let supervisor = Supervisor::default();
        let starts = failing(&supervisor, 1);
        until("the task starts twice", || starts.load(Ordering::Relaxed) == 2).await;
        assert!(supervisor.health().failing().is_empty());
        supervisor.stop().await;
        assert_eq!(starts.load(Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_keeps_failing_is_reported_until_it_recovers() {
        let supervisor = Supervisor::default();
        let starts = failing(&supervisor, 5);
        until("the task is reported", || !supervisor.health().failing().is_empty()).await;
        let failing = supervisor.health().failing();
        assert!(failing["task"].contains("3 times in a row: it panicked: start number 3"), "{failing:?}");
        until("the task runs without a panic", || starts.load(Ordering::Relaxed) == 6).await;
        assert!(!supervisor.health().failing().is_empty(), "the task has only just restarted");
        until("the task counts as recovered", || supervisor.health().failing().is_empty()).await;
        supervisor.stop().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_ends_by_itself_restarts() {
        let supervisor = Supervisor::default();
        let starts = Arc::new(AtomicU32::new(0));
        let counted = starts.clone();
        supervisor.spawn("task", move || {
            counted.fetch_add(1, Ordering::Relaxed);
            async {}
        });
        until("the task is reported", || !supervisor.health().failing().is_empty()).await;
        assert!(starts.load(Ordering::Relaxed) >= 3);
        supervisor.stop().await;
    }
}

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// How long a delivery may wait for its turn. What waits takes room from other subscribers.
const PATIENCE: Duration = Duration::from_secs(2);
/// From here on, lanes that nobody uses are dropped before a new one is made.
const MANY: usize = 1_024;

/// One lane per subscription: a bounded number of requests under way, and a wait that stays short.
///
/// A lane that is slower than its traffic refuses at once, as soon as it is known to be slow: the wait that lies ahead
/// is the number of those who wait, times the time that a request has taken of late.
#[derive(Clone)]
pub(crate) struct Lanes {
    width: usize,
    by_subscription: Arc<Mutex<HashMap<String, Arc<Lane>>>>,
}

pub(crate) struct Lane {
    width: usize,
    permits: Semaphore,
    waiting: AtomicUsize,
    /// Of a request, in microseconds, over the last few.
    average: AtomicU64,
}

/// The right to make one request.
pub(crate) struct Turn<'a> {
    lane: &'a Lane,
    started: Instant,
    _permit: SemaphorePermit<'a>,
}

impl Lanes {
    pub(crate) fn new(width: usize) -> Self {
        Self { width: width.max(1), by_subscription: Arc::default() }
    }

    pub(crate) fn of(&self, subscription_id: &str) -> Arc<Lane> {
        let mut lanes = self.by_subscription.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(lane) = lanes.get(subscription_id) {
            return lane.clone();
        }
        if lanes.len() >= MANY {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let lane = Arc::new(Lane::new(self.width));
        lanes.insert(subscription_id.to_owned(), lane.clone());
        lane
    }
}

impl Lane {
    fn new(width: usize) -> Self {
        let (waiting, average) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { width, permits: Semaphore::new(width), waiting, average }
    }

    /// Waits for a turn; `None` when it would take too long.
    pub(crate) async fn turn(&self) -> Option<Turn<'_>> {
        if self.wait_ahead() > PATIENCE {
            return None;
        }
        let _waiting = Waiting::new(&self.waiting);
        let permit = timeout(PATIENCE, self.permits.acquire()).await.ok()?.ok()?;
        Some(Turn { lane: self, started: Instant::now(), _permit: permit })
    }

    fn wait_ahead(&self) -> Duration {
        if self.permits.available_permits() > 0 {
            return Duration::ZERO;
        }
        let waiting = self.waiting.load(Ordering::Relaxed) as u64 + 1;
        Duration::from_micros(self.average.load(Ordering::Relaxed).saturating_mul(waiting) / self.width as u64)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let took = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let average = self.lane.average.load(Ordering::Relaxed);
        // Follows within about eight requests. Two that end at the same moment may lose one: it is an estimate.
        let next = if average == 0 { took } else { average - average / 8 + took / 8 };
        self.lane.average.store(next, Ordering::Relaxed);
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lane_of_unknown_speed_lets_wait_and_a_slow_one_refuses_at_once() {
        let lane = Lane::new(2);
        let (first, second) = (lane.turn().await.unwrap(), lane.turn().await.unwrap());
        let before = tokio::time::Instant::now();
        assert!(lane.turn().await.is_none());
        assert_eq!(before.elapsed(), PATIENCE, "nothing was known of it");
        drop((first, second));
        lane.average.store(10_000_000, Ordering::Relaxed);
        let _turns = (lane.turn().await.unwrap(), lane.turn().await.unwrap());
        let before = tokio::time::Instant::now();
        assert!(lane.turn().await.is_none());
        assert_eq!(before.elapsed(), Duration::ZERO, "ten seconds for each request, and two turns taken");
    }

    #[tokio::test(start_paused = true)]
    async fn a_fast_lane_lets_a_burst_wait() {
        let lane = Lane::new(2);
        lane.average.store(5_000, Ordering::Relaxed);
        let turns = (lane.turn().await.unwrap(), lane.turn().await.unwrap());
        let third = lane.turn();
        tokio::pin!(third);
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        drop(turns);
        assert!(third.await.is_some());
    }

    #[test]
    fn lanes_that_nobody_uses_go_away() {
        let lanes = Lanes::new(1);
        let kept = lanes.of("kept");
        (0..2 * MANY).for_each(|number| drop(lanes.of(&number.to_string())));
        assert!(lanes.by_subscription.lock().unwrap().len() <= MANY + 1);
        assert!(Arc::ptr_eq(&kept, &lanes.of("kept")));
    }
}

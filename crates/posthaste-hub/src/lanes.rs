use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste_core::lock;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// How long a delivery may wait for a permit. A waiting delivery uses memory and slots that other subscribers need.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// If there are this many lanes, idle lanes are dropped before a new one is made.
const MANY: usize = 1_024;

/// One lane per subscription, which bounds the concurrent requests and the time that a delivery waits for a permit.
///
/// A lane refuses a delivery at once if the expected wait is too long. The expected wait is the number of waiting
/// deliveries times the average duration of the last requests.
#[derive(Clone)]
pub(crate) struct Lanes {
    width: usize,
    by_subscription: Arc<Mutex<HashMap<String, Arc<Lane>>>>,
}

pub(crate) struct Lane {
    width: usize,
    permits: Semaphore,
    waiting: AtomicUsize,
    /// The average duration of the last requests, in microseconds.
    average: AtomicU64,
}

/// The right to make one request.
pub(crate) struct LanePermit<'a> {
    lane: &'a Lane,
    started: Instant,
    _permit: SemaphorePermit<'a>,
}

impl Lanes {
    pub(crate) fn new(width: usize) -> Self {
        Self { width: width.max(1), by_subscription: Arc::default() }
    }

    pub(crate) fn of(&self, subscription_id: &str) -> Arc<Lane> {
        let mut lanes = lock(&self.by_subscription);
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

    /// Waits for a permit; `None` if that would take too long.
    pub(crate) async fn acquire(&self) -> Option<LanePermit<'_>> {
        if self.expected_wait() > MAX_WAIT {
            return None;
        }
        let _waiting = Waiting::new(&self.waiting);
        let permit = timeout(MAX_WAIT, self.permits.acquire()).await.ok()?.ok()?;
        Some(LanePermit { lane: self, started: Instant::now(), _permit: permit })
    }

    fn expected_wait(&self) -> Duration {
        if self.permits.available_permits() > 0 {
            return Duration::ZERO;
        }
        let waiting = self.waiting.load(Ordering::Relaxed) as u64 + 1;
        Duration::from_micros(self.average.load(Ordering::Relaxed).saturating_mul(waiting) / self.width as u64)
    }
}

impl Drop for LanePermit<'_> {
    fn drop(&mut self) {
        let took = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let average = self.lane.average.load(Ordering::Relaxed);
        // A moving average over about eight requests. If two requests end at the same moment, one may be lost: it is an
        // estimate.
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
    async fn a_lane_of_unknown_speed_makes_deliveries_wait_and_a_slow_one_refuses_them_at_once() {
        let lane = Lane::new(2);
        let (first, second) = (lane.acquire().await.unwrap(), lane.acquire().await.unwrap());
        let before = tokio::time::Instant::now();
        assert!(lane.acquire().await.is_none());
        assert_eq!(before.elapsed(), MAX_WAIT, "the speed of the lane was unknown");
        drop((first, second));
        lane.average.store(10_000_000, Ordering::Relaxed);
        let _permits = (lane.acquire().await.unwrap(), lane.acquire().await.unwrap());
        let before = tokio::time::Instant::now();
        assert!(lane.acquire().await.is_none());
        assert_eq!(before.elapsed(), Duration::ZERO, "ten seconds for each request, and two permits in use");
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_in_a_fast_lane_waits_for_permits() {
        let lane = Lane::new(2);
        lane.average.store(5_000, Ordering::Relaxed);
        let permits = (lane.acquire().await.unwrap(), lane.acquire().await.unwrap());
        let third = lane.acquire();
        tokio::pin!(third);
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        drop(permits);
        assert!(third.await.is_some());
    }

    #[test]
    fn lanes_that_are_not_in_use_are_dropped() {
        let lanes = Lanes::new(1);
        let kept = lanes.of("kept");
        (0..2 * MANY).for_each(|number| drop(lanes.of(&number.to_string())));
        assert!(lock(&lanes.by_subscription).len() <= MANY + 1);
        assert!(Arc::ptr_eq(&kept, &lanes.of("kept")));
    }
}

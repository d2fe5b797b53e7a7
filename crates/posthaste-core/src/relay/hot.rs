use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::meters::Meters;
use super::renewer::deadline;
use crate::Claimed;

/// Where items come into a relay that were claimed by who made them, so that nobody has to look for them.
///
/// It has a bound of its own: who finds it full leaves the item to be claimed like any other.
pub struct HotDoor<T> {
    /// Weak, because what stands before the door is what the relay behind it claims from: neither would ever end.
    entrance: Weak<dyn Entrance<T>>,
    permits: Arc<Semaphore>,
}

/// The relay behind the door.
pub(super) trait Entrance<T>: Send + Sync {
    fn now(&self) -> u64;
    fn lease(&self) -> Duration;
    fn enter(&self, items: Vec<(Claimed<T>, OwnedSemaphorePermit)>, deadline: u64) -> Result<(), Vec<Claimed<T>>>;
    fn is_open(&self) -> bool;
    /// Whether what is held weighs so much that nothing more is to come in.
    fn is_heavy(&self) -> bool;
    fn meters(&self) -> &Meters;
}

/// A place for one hot item.
pub struct HotPermit(OwnedSemaphorePermit);

/// Until when a hot item may be delivered; taken before it is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HotDeadline(u64);

impl<T> Clone for HotDoor<T> {
    fn clone(&self) -> Self {
        Self { entrance: self.entrance.clone(), permits: self.permits.clone() }
    }
}

impl<T> HotDoor<T> {
    pub(super) fn new(entrance: Arc<dyn Entrance<T>>, capacity: usize) -> Self {
        let permits = Arc::new(Semaphore::new(capacity.min(Semaphore::MAX_PERMITS)));
        Self { entrance: Arc::downgrade(&entrance), permits }
    }

    /// Whether the relay behind it still takes items in.
    pub fn is_open(&self) -> bool {
        self.entrance.upgrade().is_some_and(|entrance| entrance.is_open())
    }

    /// A place, if there is one. `None` is counted as dropped: the item waits to be claimed.
    pub fn permit(&self) -> Option<HotPermit> {
        let entrance = self.entrance.upgrade()?;
        let permit = self.permits.clone().try_acquire_owned().ok().filter(|_| !entrance.is_heavy());
        if permit.is_none() {
            entrance.meters().hot_dropped();
        }
        permit.map(HotPermit)
    }

    /// A delayed item does not come in here; counted.
    pub fn skip_delayed(&self) {
        if let Some(entrance) = self.entrance.upgrade() {
            entrance.meters().hot_skipped_delayed();
        }
    }

    /// To be asked before the items are claimed.
    pub fn deadline(&self) -> HotDeadline {
        let entrance = self.entrance.upgrade();
        HotDeadline(entrance.map_or(0, |entrance| deadline(entrance.now(), entrance.lease())))
    }

    /// Hands over items that are claimed since before `deadline` was asked for. Given back are those that come too late,
    /// or to a relay that stops: they are to be released.
    pub fn hand_over(&self, items: Vec<(Claimed<T>, HotPermit)>, until: HotDeadline) -> Result<(), Vec<Claimed<T>>> {
        match self.entrance.upgrade().filter(|entrance| entrance.now() < until.0) {
            Some(entrance) => {
                entrance.enter(items.into_iter().map(|(claimed, permit)| (claimed, permit.0)).collect(), until.0)
            }
            None => Err(items.into_iter().map(|(claimed, _)| claimed).collect()),
        }
    }
}

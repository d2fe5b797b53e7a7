use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// "There may be something to claim": a hint from whoever writes to whoever claims.
///
/// Hints may be lost and may be wrong; polling is the truth. Clones share one signal, which one relay waits for.
#[derive(Clone, Default)]
pub struct Wakeup(Arc<Inner>);

#[derive(Default)]
struct Inner {
    notify: Notify,
    pending: AtomicU8,
}

/// When to look for a row whose commit cannot be seen: most commit within a millisecond, a few take longer.
pub(crate) const PROBES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(5), Duration::from_millis(25), Duration::from_millis(125)];

/// How soon there may be something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// It is there: look now.
    Now,
    /// It is written but its commit cannot be seen: look now and a few times more within the next moments.
    Soon,
}

const NOW: u8 = 1;
const SOON: u8 = 2;

impl Wakeup {
    /// There may be something now.
    pub fn wake(&self) {
        self.signal(NOW);
    }

    /// For a write whose commit this process cannot see.
    pub fn wake_soon(&self) {
        self.signal(SOON);
    }

    fn signal(&self, bit: u8) {
        self.0.pending.fetch_or(bit, Ordering::AcqRel);
        self.0.notify.notify_one();
    }

    /// Waits for a signal given since the last call; several are one.
    pub async fn signalled(&self) -> Signal {
        loop {
            match self.0.pending.swap(0, Ordering::AcqRel) {
                0 => self.0.notify.notified().await,
                bits if bits & SOON != 0 => return Signal::Soon,
                _ => return Signal::Now,
            }
        }
    }
}

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// "There may be something to claim": a hint from a writer to the claimer.
///
/// Hints may be lost and may be wrong, so the claimer also polls. Clones share one signal, which one relay waits for.
#[derive(Clone, Default)]
pub struct Wakeup(Arc<Inner>);

#[derive(Default)]
struct Inner {
    notify: Notify,
    pending: AtomicU8,
}

/// When to poll for a row whose commit cannot be seen: most commit within a millisecond, a few take longer.
pub(crate) const PROBES: [Duration; 4] =
    [Duration::from_millis(1), Duration::from_millis(5), Duration::from_millis(25), Duration::from_millis(125)];

/// The pause between two notifications of other processes: one notification is enough for all commits before it.
pub(crate) const NOTIFY_PAUSE: Duration = Duration::from_millis(10);
/// How long a notification may take. It is only a hint, so it is given up then.
pub(crate) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait before listening again after the connection was lost.
pub(crate) const LISTEN_PAUSE: Duration = Duration::from_secs(1);

/// How soon there may be something to claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// It is committed: claim now.
    Now,
    /// It is written but its commit cannot be seen: claim now and a few times more within the next moments.
    Soon,
}

const NOW: u8 = 1;
const SOON: u8 = 2;

impl Wakeup {
    /// For a write that is committed.
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

    /// Waits for a signal given since the last call. Several signals count as one.
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

//! What the checkers of both simulations keep of a run.

use std::time::Duration;

use tokio::time::Instant;

use super::LEASE;

/// The faults of one process.
#[derive(Default)]
pub(super) struct Faults {
    pub(super) crashed: bool,
    /// When it was paused, and until when.
    freezes: Vec<(Instant, Instant)>,
}

impl Faults {
    /// The process is paused from now on.
    pub(super) fn freeze(&mut self, until: Instant) {
        self.freezes.push((Instant::now(), until));
    }

    /// True if a delivery that the process started at this time may be repeated.
    pub(super) fn excuse(&self, started: Instant) -> bool {
        let since = self.freezes.iter().filter(|(_, until)| *until > started);
        let paused_for: Duration = since.map(|(from, until)| *until - *from).sum();
        // A shorter pause costs one renewal at most, and two of three renewals may fail.
        self.crashed || paused_for > LEASE / 3
    }
}

/// A hash of everything that happened, with the times. Two runs with the same digest went the same way.
pub(super) struct Digest {
    began: Instant,
    value: u64,
}

impl Digest {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), value: 0 }
    }

    /// Adds words and the current time.
    pub(super) fn note(&mut self, words: &[u64]) {
        let now = self.began.elapsed().as_millis() as u64;
        for word in words.iter().chain([&now]) {
            self.value = (self.value ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
    }

    pub(super) fn value(&self) -> u64 {
        self.value
    }
}

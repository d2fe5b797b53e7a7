use std::collections::HashMap;
use std::sync::Arc;

use posthaste_core::filter::{Condition, Json, Pointer};

use super::index::{ActiveSubscription, Position};
use super::payload::Payload;

/// The subscriptions of one key that have a filter.
///
/// A subscription with a condition that only certain values meet (`eq`, `in`) is found by the value in the payload. The
/// others are scanned.
pub(super) struct Filtered {
    by_path: Vec<ByValue>,
    scanned: Vec<Position>,
}

/// Subscriptions by the value that the payload must have at one path.
struct ByValue {
    path: Pointer,
    positions: HashMap<Json<'static>, Vec<Position>>,
}

impl Filtered {
    pub(super) fn new(positions: &[Position], active: &[Arc<ActiveSubscription>]) -> Self {
        let conditions = |position: Position| active[position as usize].filter().conditions();
        // How many subscriptions each value would find. Of several conditions, the one that finds the fewest is indexed.
        let mut counts: HashMap<(&Pointer, &Json<'_>), usize> = HashMap::new();
        for condition in positions.iter().flat_map(|position| conditions(*position)) {
            for value in condition.only_values().unwrap_or_default() {
                *counts.entry((condition.pointer(), value)).or_default() += 1;
            }
        }
        let count = |condition: &Condition| {
            let values = condition.only_values()?.iter();
            Some(values.map(|value| counts.get(&(condition.pointer(), value)).copied().unwrap_or_default()).sum())
        };
        let mut by_path: HashMap<&Pointer, HashMap<Json<'static>, Vec<Position>>> = HashMap::new();
        let mut scanned = Vec::new();
        for position in positions {
            let counted = conditions(*position).iter().filter_map(|condition| Some((count(condition)?, condition)));
            match counted.min_by_key(|(count, _): &(usize, _)| *count) {
                Some((_, condition)) => {
                    let by_value = by_path.entry(condition.pointer()).or_default();
                    for value in condition.only_values().unwrap_or_default() {
                        by_value.entry(value.clone()).or_default().push(*position);
                    }
                }
                None => scanned.push(*position),
            }
        }
        let by_path = by_path.into_iter().map(|(path, positions)| ByValue { path: path.clone(), positions });
        Self { by_path: by_path.collect(), scanned }
    }

    /// Adds the positions of the subscriptions that match.
    pub(super) fn find(&self, payload: &Payload<'_>, active: &[Arc<ActiveSubscription>], found: &mut Vec<Position>) {
        let Some(json) = payload.json() else { return };
        let by_value = self.by_path.iter().filter_map(|by_value| by_value.positions.get(json.find(&by_value.path)?));
        let candidates = by_value.flatten().chain(&self.scanned);
        found.extend(candidates.filter(|position| active[**position as usize].filter().matches(json)));
    }
}

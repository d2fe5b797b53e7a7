use std::collections::HashMap;
use std::time::Duration;

use super::WaitingSubscription;
use crate::Load;

/// Knows how many dead letters of a subscription can be sent now. Dead letters that cannot be sent are not claimed.
pub trait DeadLetterRoom: Send + Sync + 'static {
    /// How many more dead letters of this subscription can be sent, if these are claimed already: `in_flight` of this
    /// subscription, `all` of all subscriptions.
    fn room(&self, subscription_id: &str, in_flight: Load, all: Load) -> Room;

    /// An operator has asked for a replay: endpoints that are held may get a request now.
    fn end_holds(&self);
}

/// How many dead letters can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// So many at once. If it is none, the relay is woken when there is room.
    For(usize),
    /// None before this time has passed.
    After(Duration),
}

/// Room for every dead letter.
pub struct Unlimited;

impl DeadLetterRoom for Unlimited {
    fn room(&self, _: &str, _: Load, _: Load) -> Room {
        Room::For(usize::MAX)
    }

    fn end_holds(&self) {}
}

/// The dead letters that are claimed: of each subscription, and of all.
#[derive(Default)]
pub(super) struct ClaimedLoad {
    by_subscription: HashMap<String, Load>,
    all: Load,
}

impl ClaimedLoad {
    pub(super) fn add(&mut self, subscription_id: &str, bytes: usize) {
        *self.by_subscription.entry(subscription_id.to_owned()).or_default() += Load::one(bytes);
        self.all += Load::one(bytes);
    }
}

/// How many dead letters to claim of each subscription.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) by_subscription: Vec<(String, usize)>,
    /// When a subscription that has no room now will have some.
    pub(super) next_room: Option<Duration>,
}

/// Claims at most `limit` dead letters together. Each subscription gets one in turn, beginning with the one after
/// `last`, until the limit is reached or none has room for more.
pub(super) fn shares(
    waiting: &[WaitingSubscription],
    room: &dyn DeadLetterRoom,
    claimed: &ClaimedLoad,
    last: &str,
    limit: usize,
) -> Shares {
    let (mut rooms, mut next_room): (Vec<(&str, usize)>, Option<Duration>) = (Vec::new(), None);
    for waiting in waiting.iter().filter(|waiting| waiting.due_in.is_zero()) {
        let id = waiting.subscription_id.as_str();
        let in_flight = claimed.by_subscription.get(id).copied().unwrap_or_default();
        match room.room(id, in_flight, claimed.all) {
            Room::For(0) => {}
            Room::For(room) => rooms.push((id, room)),
            Room::After(wait) => next_room = Some(next_room.map_or(wait, |next| next.min(wait))),
        }
    }
    rooms.sort_unstable_by_key(|(id, _)| (*id <= last, *id));
    let mut shares = vec![0; rooms.len()];
    let mut left = limit;
    while left > 0 {
        let before = left;
        for (share, (_, room)) in shares.iter_mut().zip(&rooms) {
            if left > 0 && *share < *room {
                *share += 1;
                left -= 1;
            }
        }
        if left == before {
            break;
        }
    }
    let shares = rooms.iter().zip(shares).filter(|(_, share)| *share > 0);
    Shares { by_subscription: shares.map(|((id, _), share)| ((*id).to_owned(), share)).collect(), next_room }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Rooms(&'static [(&'static str, usize)]);

    impl DeadLetterRoom for Rooms {
        fn room(&self, subscription_id: &str, in_flight: Load, all: Load) -> Room {
            assert_eq!(all, Load { items: 2, bytes: 20 });
            let room = self.0.iter().find(|(id, _)| *id == subscription_id).map_or(0, |(_, room)| *room);
            match subscription_id {
                "held" => Room::After(Duration::from_secs(room as u64)),
                _ => Room::For(room.saturating_sub(in_flight.items)),
            }
        }

        fn end_holds(&self) {}
    }

    fn waiting(ids: &[(&str, u64)]) -> Vec<WaitingSubscription> {
        let waiting = |(id, due_in): &(&str, u64)| WaitingSubscription {
            subscription_id: (*id).to_owned(),
            due_in: Duration::from_secs(*due_in),
        };
        ids.iter().map(waiting).collect()
    }

    fn of(ids: &[(&str, u64)], rooms: &'static [(&'static str, usize)], last: &str, limit: usize) -> Shares {
        let mut claimed = ClaimedLoad::default();
        [10, 10].iter().for_each(|bytes| claimed.add("busy", *bytes));
        shares(&waiting(ids), &Rooms(rooms), &claimed, last, limit)
    }

    fn named(shares: &[(&str, usize)]) -> Shares {
        let by_subscription = shares.iter().map(|(id, share)| ((*id).to_owned(), *share)).collect();
        Shares { by_subscription, next_room: None }
    }

    #[test]
    fn every_subscription_gets_its_turn() {
        let rooms = &[("a", 100), ("b", 100), ("c", 2)];
        let ids = [("a", 0), ("b", 0), ("c", 0)];
        assert_eq!(of(&ids, rooms, "", 10), named(&[("a", 4), ("b", 4), ("c", 2)]));
        assert_eq!(of(&ids, rooms, "a", 2), named(&[("b", 1), ("c", 1)]));
        assert_eq!(of(&ids, rooms, "c", 2), named(&[("a", 1), ("b", 1)]));
    }

    #[test]
    fn nothing_is_claimed_that_is_not_due_or_cannot_be_sent() {
        let rooms = &[("full", 0), ("busy", 3), ("later", 9)];
        assert_eq!(of(&[("full", 0), ("busy", 0), ("later", 5)], rooms, "", 10), named(&[("busy", 1)]));
        let held = of(&[("full", 0), ("held", 0)], &[("full", 0), ("held", 7)], "", 10);
        assert_eq!(held, Shares { next_room: Some(Duration::from_secs(7)), ..Shares::default() });
    }
}

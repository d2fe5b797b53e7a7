mod lane_state;

use std::collections::HashMap;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Either;
use posthaste_core::hub_store::{DeadLetterRoom, Room};
use posthaste_core::{Load, Wakeup, lock};
use posthaste_webhook::ResponseKind;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use self::lane_state::{LaneState, Standing};

/// How long a delivery may wait for a permit. A waiting delivery uses memory that other subscribers need.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// If there are this many lanes, idle lanes are dropped before a new one is made.
const MANY: usize = 16_384;
/// The size that is assumed for a dead letter before it is read.
const LARGE_DEAD_LETTER: usize = 1024 * 1024;

/// What the lanes of all subscriptions may hold in memory together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budgets {
    pub(crate) fresh: Load,
    pub(crate) dead_letters: Load,
}

/// One lane per subscription: the requests to one endpoint, and what waits for them in memory.
///
/// All lanes have one budget. A lane may hold an eighth of what the others have left, so the shares shrink as lanes
/// grow. A part of the budget is reserved for the first delivery of each lane. The less is known about an endpoint, the
/// more stays reserved for the others: see [`Standing`]. So some of the budget is free, however many endpoints hang.
///
/// A lane that has spent its share refuses deliveries at once. They become dead letters, which are delivered as soon as
/// the lane has room for them. Only a lane that would send them within half a second postpones them instead.
///
/// Fresh events and dead letters have separate permits and separate budgets. They share what is known about the
/// endpoint.
#[derive(Clone)]
pub(crate) struct Lanes(Arc<Shared>);

struct Shared {
    width: usize,
    budgets: Budgets,
    state: Mutex<State>,
    /// The relay of the dead letters: woken when a lane may have room for them again.
    dead_letters: Wakeup,
}

#[derive(Default)]
struct State {
    by_subscription: HashMap<String, Arc<Lane>>,
    /// The fresh deliveries that all lanes hold.
    held: Load,
}

struct Lane {
    fresh: Arc<Semaphore>,
    dead_letters: Arc<Semaphore>,
    state: Mutex<LaneState>,
}

/// What happens to a fresh delivery.
pub(crate) enum Admission {
    /// It may be sent, as soon as it has a permit.
    Admitted(LanePlace),
    /// The lane has spent its share, but is fast: it may come again after this time.
    Postponed(Duration),
    /// The lane has spent its share.
    Refused,
}

/// The place of one delivery in its lane. Places get their permits in the order in which they were made.
pub(crate) struct LanePlace {
    lanes: Lanes,
    lane: Arc<Lane>,
    /// The size of a fresh delivery; `None` for a dead letter.
    fresh_bytes: Option<usize>,
    permit: NextPermit,
}

/// A permit, or a place in the queue for one.
type NextPermit = Either<Ready<PermitResult>, Pin<Box<dyn Future<Output = PermitResult> + Send>>>;
type PermitResult = Result<OwnedSemaphorePermit, AcquireError>;

fn next_permit(permits: &Arc<Semaphore>) -> NextPermit {
    if let Ok(permit) = permits.clone().try_acquire_owned() {
        return Either::Left(ready(Ok(permit)));
    }
    let mut permit: Pin<Box<dyn Future<Output = PermitResult> + Send>> = Box::pin(permits.clone().acquire_owned());
    // The first poll joins the queue.
    match (&mut permit).now_or_never() {
        Some(permit) => Either::Left(ready(permit)),
        None => Either::Right(permit),
    }
}

/// The right to make one request.
pub(crate) struct LanePermit {
    place: LanePlace,
    /// The endpoint was unresponsive when the request began.
    is_probe: bool,
    started: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Lanes {
    /// `width` is the maximum number of concurrent requests of fresh deliveries to one subscription. Dead letters may
    /// use a quarter as many in addition.
    pub(crate) fn new(width: usize, budgets: Budgets, dead_letters: Wakeup) -> Self {
        Self(Arc::new(Shared { width: width.max(1), budgets, state: Mutex::default(), dead_letters }))
    }

    fn dead_letter_width(&self) -> usize {
        self.0.width.div_ceil(4)
    }

    fn lane(&self, state: &mut State, subscription_id: &str) -> Arc<Lane> {
        if let Some(lane) = state.by_subscription.get(subscription_id) {
            return lane.clone();
        }
        if state.by_subscription.len() >= MANY {
            state
                .by_subscription
                .retain(|_, lane| Arc::strong_count(lane) > 1 || lock(&lane.state).held_for().is_some());
        }
        let lane = Arc::new(Lane {
            fresh: Arc::new(Semaphore::new(self.0.width)),
            dead_letters: Arc::new(Semaphore::new(self.dead_letter_width())),
            state: Mutex::default(),
        });
        state.by_subscription.insert(subscription_id.to_owned(), lane.clone());
        lane
    }

    /// Admits a fresh delivery of this size, unless its lane has spent its share or would take too long.
    pub(crate) fn admit(&self, subscription_id: &str, bytes: usize) -> Admission {
        let mut state = lock(&self.0.state);
        let lane = self.lane(&mut state, subscription_id);
        let mut lane_state = lock(&lane.state);
        if !self.has_room(state.held, &lane_state, bytes) {
            return match lane_state.postpone(self.0.width, bytes, Instant::now()) {
                Some(wait) => Admission::Postponed(wait),
                None => Admission::Refused,
            };
        }
        if lane_state.expected_wait(self.0.width) > MAX_WAIT {
            return Admission::Refused;
        }
        state.held += Load::one(bytes);
        lane_state.held += Load::one(bytes);
        drop(lane_state);
        let permit = next_permit(&lane.fresh);
        Admission::Admitted(LanePlace { lanes: self.clone(), lane, fresh_bytes: Some(bytes), permit })
    }

    fn has_room(&self, all: Load, lane: &LaneState, bytes: usize) -> bool {
        let (standing, budget) = (lane.standing(), self.0.budgets.fresh);
        if standing == Standing::Unresponsive && (lane.has_requests() || lane.held_for().is_some()) {
            return false;
        }
        let mut next = lane.held;
        next += Load::one(bytes);
        match lane.held.items {
            0 => next.is_within(standing.first(budget, all)),
            _ => next.is_within(standing.share(budget, all)),
        }
    }

    /// Admits a dead letter. The claim has checked that there is room for it.
    pub(crate) fn admit_dead_letter(&self, subscription_id: &str) -> LanePlace {
        let lane = self.lane(&mut lock(&self.0.state), subscription_id);
        let permit = next_permit(&lane.dead_letters);
        LanePlace { lanes: self.clone(), lane, fresh_bytes: None, permit }
    }
}

impl DeadLetterRoom for Lanes {
    fn end_holds(&self) {
        lock(&self.0.state).by_subscription.values().for_each(|lane| lock(&lane.state).hold_until = None);
    }

    /// An endpoint that has not responded yet gets one dead letter at first.
    fn room(&self, subscription_id: &str, in_flight: Load, all: Load) -> Room {
        let state = lock(&self.0.state);
        let lane = state.by_subscription.get(subscription_id).map(|lane| lock(&lane.state));
        let standing = lane.as_ref().map_or(Standing::Unproven, |lane| lane.standing());
        let budget = self.0.budgets.dead_letters;
        let is_busy = match standing {
            Standing::Unresponsive => in_flight.items > 0 || lane.as_ref().is_some_and(|lane| lane.has_requests()),
            Standing::Unproven => in_flight.items > 0,
            Standing::Responsive => in_flight.items > self.dead_letter_width(),
        };
        if is_busy {
            return Room::For(0);
        }
        // One batch is sent while the next one waits, so that claims are not made one by one. At a slow endpoint, that
        // batch would wait too long.
        let is_slow = lane.as_ref().is_some_and(|lane| Duration::from_micros(lane.average) > MAX_WAIT / 4);
        let most = if is_slow { self.dead_letter_width() } else { 2 * self.dead_letter_width() };
        if let Some(hold) = lane.and_then(|lane| lane.held_for()) {
            return Room::After(hold);
        }
        let is_first = in_flight.items == 0;
        let first = usize::from(is_first && Load::one(LARGE_DEAD_LETTER).is_within(standing.first(budget, all)));
        if standing != Standing::Responsive {
            return Room::For(first);
        }
        let share = standing.share(budget, all).saturating_sub(in_flight);
        let share = share.items.min(share.bytes / LARGE_DEAD_LETTER).max(first);
        Room::For(share.min(most - in_flight.items))
    }
}

impl LanePlace {
    fn is_fresh(&self) -> bool {
        self.fresh_bytes.is_some()
    }

    /// Waits for its permit; `None` if that takes too long, or if the endpoint is unresponsive by then and gets no
    /// further request now.
    pub(crate) async fn acquire(mut self) -> Option<LanePermit> {
        let permit = timeout(MAX_WAIT, &mut self.permit).await.ok()?.ok()?;
        let mut state = lock(&self.lane.state);
        if state.is_unresponsive() && (state.has_requests() || state.held_for().is_some()) {
            return None;
        }
        *state.requests(self.is_fresh()) += 1;
        let is_probe = state.is_unresponsive();
        drop(state);
        Some(LanePermit { place: self, is_probe, started: Instant::now(), _permit: permit })
    }
}

impl Drop for LanePlace {
    fn drop(&mut self) {
        let Some(bytes) = self.fresh_bytes else { return };
        let mut state = lock(&self.lanes.0.state);
        let mut lane = lock(&self.lane.state);
        state.held -= Load::one(bytes);
        lane.held -= Load::one(bytes);
    }
}

impl LanePermit {
    /// Notes how the endpoint behaved.
    pub(crate) fn ended(&self, response: ResponseKind) {
        let took = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX).max(1);
        let mut lane = lock(&self.place.lane.state);
        let before = lane.standing();
        match response {
            ResponseKind::Responded => lane.responded(took),
            ResponseKind::TimedOut => lane.timed_out(took, self.is_probe),
            ResponseKind::NoConnection => lane.unanswered(self.is_probe),
        }
        let is_proven = lane.standing() == Standing::Responsive;
        drop(lane);
        if is_proven && before != Standing::Responsive {
            self.place.lanes.0.dead_letters.wake();
        }
    }
}

impl Drop for LanePermit {
    fn drop(&mut self) {
        let mut lane = lock(&self.place.lane.state);
        *lane.requests(self.place.is_fresh()) -= 1;
        let is_unresponsive = lane.is_unresponsive();
        drop(lane);
        // The next probe may be a dead letter.
        if is_unresponsive {
            self.place.lanes.0.dead_letters.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;

    use super::lane_state::{LONGEST_HOLD, LONGEST_POSTPONED, MAX_POSTPONED};
    use super::*;

    const BUDGET: Load = Load { items: 1_200, bytes: 1_200_000 };
    const MIB: usize = 1024 * 1024;

    fn lanes(width: usize) -> Lanes {
        let budgets = Budgets { fresh: BUDGET, dead_letters: Load { items: 100, bytes: 100 * MIB } };
        Lanes::new(width, budgets, Wakeup::default())
    }

    fn admit(lanes: &Lanes, subscription_id: &str, bytes: usize) -> Option<LanePlace> {
        match lanes.admit(subscription_id, bytes) {
            Admission::Admitted(place) => Some(place),
            Admission::Postponed(_) | Admission::Refused => None,
        }
    }

    /// Admits deliveries until the share of the lane is spent.
    fn fill(lanes: &Lanes, subscription_id: &str, bytes: usize) -> Vec<LanePlace> {
        std::iter::from_fn(|| admit(lanes, subscription_id, bytes)).collect()
    }

    async fn respond(lanes: &Lanes, subscription_id: &str, response: ResponseKind) {
        let place = admit(lanes, subscription_id, 1).unwrap();
        place.acquire().await.unwrap().ended(response);
    }

    #[tokio::test]
    async fn however_many_endpoints_do_not_respond_the_others_get_their_share() {
        for (bytes, share) in [(1, 30), (5_000, 3)] {
            let lanes = lanes(4);
            respond(&lanes, "good", ResponseKind::Responded).await;
            let mut held = Vec::new();
            for number in 0..2_000 {
                held.extend(fill(&lanes, &format!("bad {number}"), bytes));
            }
            assert!(held.len() <= 1_050 && held.len() * bytes <= 1_050_000, "{} of {bytes}", held.len());
            let good = fill(&lanes, "good", bytes);
            assert!(!good.is_empty());
            drop(held);
            assert!(fill(&lanes, "good", bytes).len() > share);
        }
    }

    #[tokio::test]
    async fn shares_shrink_as_lanes_grow() {
        let lanes = lanes(4);
        let mut held = Vec::new();
        let mut shares = Vec::new();
        for number in 0..100 {
            let subscription = number.to_string();
            respond(&lanes, &subscription, ResponseKind::Responded).await;
            let filled = fill(&lanes, &subscription, 1);
            shares.push(filled.len());
            held.extend(filled);
        }
        assert!(shares.iter().rev().is_sorted(), "{shares:?}");
        assert_eq!((shares[0], shares[99]), (100, 1));
    }

    #[tokio::test]
    async fn a_lane_gets_a_larger_share_once_its_endpoint_has_responded() {
        let lanes = lanes(4);
        assert_eq!(fill(&lanes, "s", 1).len(), 66);
        respond(&lanes, "s", ResponseKind::Responded).await;
        assert_eq!(fill(&lanes, "s", 1).len(), 100);
        respond(&lanes, "s", ResponseKind::TimedOut).await;
        assert_eq!(fill(&lanes, "s", 1).len(), 66);
        assert_eq!(lock(&lanes.0.state).held, Load::default());
    }

    #[tokio::test]
    async fn an_endpoint_gets_one_dead_letter_and_more_of_them_once_it_has_responded() {
        let lanes = lanes(16);
        let room = |items: usize, all: usize| match lanes.room(
            "s",
            Load { items, bytes: items * MIB },
            Load { items: all, bytes: all * MIB },
        ) {
            Room::For(letters) => letters,
            Room::After(hold) => panic!("held for {hold:?}"),
        };
        assert_eq!((room(0, 0), room(1, 1)), (1, 0));
        assert_eq!((room(0, 86), room(0, 87)), (1, 0), "some are reserved for endpoints that respond");
        respond(&lanes, "s", ResponseKind::Responded).await;
        assert_eq!((room(0, 0), room(3, 3), room(4, 4), room(5, 5)), (8, 5, 4, 0));
        assert_eq!((room(0, 50), room(0, 75), room(1, 75)), (3, 1, 0), "less if others have more");
        assert_eq!((room(0, 99), room(0, 100)), (1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_hangs_gets_one_request_at_a_time_until_it_responds() {
        let lanes = lanes(4);
        let room = |items| lanes.room("s", Load { items, bytes: items }, Load::default());
        let mut places = fill(&lanes, "s", 1).into_iter();
        let mut acquire = async || places.next().unwrap().acquire().await;
        let in_flight = [acquire().await, acquire().await, acquire().await, acquire().await].map(Option::unwrap);
        in_flight.iter().for_each(|permit| permit.ended(ResponseKind::TimedOut));
        drop(in_flight);
        assert!(acquire().await.is_none(), "deliveries that were admitted before are not sent");
        drop(places);
        for hold in [1, 4, 16, 64, 120, 120].map(Duration::from_secs) {
            assert_eq!(room(0), Room::After(hold), "it is left alone for a while");
            assert!(admit(&lanes, "s", 1).is_none());
            tokio::time::advance(hold).await;
            assert_eq!((room(0), room(1)), (Room::For(1), Room::For(0)), "a dead letter may be the next probe");
            let probe = admit(&lanes, "s", 1).unwrap().acquire().await.unwrap();
            assert!(admit(&lanes, "s", 1).is_none());
            assert_eq!(room(0), Room::For(0));
            probe.ended(ResponseKind::TimedOut);
        }
        assert_eq!(room(0), Room::After(LONGEST_HOLD));
        lanes.end_holds();
        assert_eq!(room(0), Room::For(1), "an operator has asked for a replay");
        respond(&lanes, "s", ResponseKind::Responded).await;
        assert!(fill(&lanes, "s", 1).len() > 4, "any response restores the lane");
        assert_eq!(room(0), Room::For(2));
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_refuses_many_connections_in_a_row_is_left_alone() {
        let lanes = lanes(4);
        for _ in 0..19 {
            respond(&lanes, "s", ResponseKind::NoConnection).await;
        }
        respond(&lanes, "s", ResponseKind::Responded).await;
        for _ in 0..20 {
            respond(&lanes, "s", ResponseKind::NoConnection).await;
        }
        assert!(admit(&lanes, "s", 1).is_none());
        assert_eq!(lanes.room("s", Load::default(), Load::default()), Room::After(Duration::from_secs(1)));
        tokio::time::advance(Duration::from_secs(1)).await;
        respond(&lanes, "s", ResponseKind::Responded).await;
        assert!(fill(&lanes, "s", 1).len() > 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_delivery_waits_for_a_permit_and_no_longer_than_two_seconds() {
        let lanes = lanes(2);
        let mut places = fill(&lanes, "s", 1).into_iter();
        let mut next = || places.next().unwrap();
        let permits = (next().acquire().await.unwrap(), next().acquire().await.unwrap());
        let before = Instant::now();
        assert!(next().acquire().await.is_none());
        assert_eq!(before.elapsed(), MAX_WAIT);
        permits.0.ended(ResponseKind::Responded);
        drop(permits);
        assert!(next().acquire().await.is_some());
    }

    #[tokio::test]
    async fn deliveries_get_their_permits_in_the_order_of_their_admission() {
        let lanes = lanes(1);
        let [first, second, third] = [(); 3].map(|()| admit(&lanes, "s", 1).unwrap());
        let permit = first.acquire().await.unwrap();
        let mut third = Box::pin(third.acquire());
        assert!((&mut third).now_or_never().is_none());
        drop(permit);
        assert!((&mut third).now_or_never().is_none(), "the second is before it");
        let permit = second.acquire().await.unwrap();
        drop(permit);
        assert!(third.await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_lane_refuses_what_would_wait_too_long() {
        let lanes = lanes(2);
        let places = [(); 2].map(|()| admit(&lanes, "s", 1).unwrap());
        let permits = join_all(places.map(LanePlace::acquire)).await;
        tokio::time::sleep(Duration::from_secs(10)).await;
        permits[0].as_ref().unwrap().ended(ResponseKind::Responded);
        assert!(admit(&lanes, "s", 1).is_none(), "ten seconds for each request, and two permits in use");
        drop(permits);
        assert!(admit(&lanes, "s", 1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_fast_lane_postpones_what_exceeds_its_share() {
        let lanes = lanes(2);
        let _unproven = fill(&lanes, "unproven", 1);
        assert!(matches!(lanes.admit("unproven", 1), Admission::Refused));
        for (subscription, millis, postponed) in [("fast", 1, true), ("slow", 1_000, false)] {
            let place = admit(&lanes, subscription, 1).unwrap();
            let permit = place.acquire().await.unwrap();
            tokio::time::sleep(Duration::from_millis(millis)).await;
            permit.ended(ResponseKind::Responded);
            drop(permit);
            let _held = fill(&lanes, subscription, 1);
            assert_eq!(matches!(lanes.admit(subscription, 1), Admission::Postponed(_)), postponed, "{subscription}");
        }
        let postponed = |bytes| {
            let waits = std::iter::from_fn(|| match lanes.admit("fast", bytes) {
                Admission::Postponed(wait) => Some(wait),
                Admission::Admitted(_) | Admission::Refused => None,
            });
            waits.collect::<Vec<_>>()
        };
        let _held = fill(&lanes, "fast", 1);
        let waits = postponed(1);
        assert!(waits.is_sorted() && waits.last().unwrap() <= &LONGEST_POSTPONED, "{waits:?}");
        assert!((100..=MAX_POSTPONED.items).contains(&waits.len()), "{}", waits.len());
        tokio::time::advance(LONGEST_POSTPONED * 2).await;
        assert!((1..=4).contains(&postponed(MIB).len()), "less if the deliveries are large");
    }

    #[tokio::test]
    async fn lanes_that_are_not_in_use_are_dropped() {
        let lanes = lanes(1);
        let _kept = admit(&lanes, "kept", 1);
        (0..2 * MANY).for_each(|number| drop(admit(&lanes, &number.to_string(), 1)));
        assert!(lock(&lanes.0.state).by_subscription.len() <= MANY + 1);
        assert!(lock(&lanes.0.state).by_subscription.contains_key("kept"));
    }
}

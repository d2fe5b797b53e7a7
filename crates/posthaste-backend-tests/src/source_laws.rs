//! The laws of [`Source`], one function each. [`source_laws!`](crate::source_laws!) makes a test of every one, and
//! [`keyed_source_laws!`](crate::keyed_source_laws!) of those about items with a key.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_core::{Claim, Claimed, Disposition, Failure, FaultKind, Settled, Settlement, Source, StoreError};

/// A lease that ends while a law waits for it.
pub const SHORT_LEASE: Duration = Duration::from_secs(1);
/// A lease that never ends within a test, even on a busy machine.
pub const LONG_LEASE: Duration = Duration::from_secs(120);

/// The time after which a law stops waiting and fails.
const DEADLINE: Duration = Duration::from_secs(20);
/// A wait may end this much too early, because stores keep whole milliseconds.
const TOLERANCE: Duration = Duration::from_millis(5);
/// The delay that laws use.
const WAIT: Duration = Duration::from_millis(300);

/// One store that sources are opened on. Each round of a law gets a fresh one, empty.
#[async_trait]
pub trait SourceHarness: Send + Sync {
    /// The source under test.
    type Source: Source;

    /// A new owner of claims on the store. Two owners share nothing but the store, like two processes.
    async fn open(&self) -> Self::Source;

    /// Inserts an item that is due after `delay`.
    async fn insert(&self, label: &str, delay: Duration);

    /// The label with which the item was inserted.
    fn label(&self, item: &<Self::Source as Source>::Item) -> String;
}

/// A store whose items may have a key.
#[async_trait]
pub trait KeyedSourceHarness: SourceHarness {
    /// Inserts an item of this key that is due at once.
    async fn insert_keyed(&self, label: &str, key: &str);
}

/// Expands to one test per law of [`Source`](posthaste_core::Source). `$start` is an async function that makes a fresh
/// harness whose sources have the lease it is given: `source_laws!(Harness::start)`.
#[macro_export]
macro_rules! source_laws {
    ($start:expr) => {
        $crate::source_laws!(
            $start, $crate::source_laws::LONG_LEASE =>
            claim_never_returns_an_item_twice_within_a_lease
            claim_respects_the_limit_and_the_due_time
            settle_twice_is_lost_lease
            a_released_item_is_claimable_at_once
            a_clean_stop_releases_claims
            a_counted_retry_counts_and_waits
            an_uncounted_retry_waits_only
            dead_is_not_claimable
            done_is_not_claimable
        );
        $crate::source_laws!(
            $start, $crate::source_laws::LONG_LEASE, in rounds =>
            claim_returns_items_in_order
        );
        $crate::source_laws!(
            $start, $crate::source_laws::SHORT_LEASE, in rounds =>
            an_expired_lease_is_claimable_again
            settle_by_a_stale_owner_is_lost_lease
            leases_are_renewed
        );
    };
    ($start:expr, $lease:expr => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::source_laws::$law(&$start($lease).await).await;
            }
        )*
    };
    ($start:expr, $lease:expr, in rounds => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::source_laws::until_conclusive(|| $start($lease), $crate::source_laws::$law).await;
            }
        )*
    };
}

/// Expands to one test per law of [`Source`](posthaste_core::Source) about items with a key, see
/// [`source_laws!`](crate::source_laws!).
#[macro_export]
macro_rules! keyed_source_laws {
    ($start:expr) => {
        $crate::source_laws!(
            $start, $crate::source_laws::LONG_LEASE =>
            a_key_is_claimed_by_one_owner_at_a_time
            a_key_keeps_its_order_through_retries
        );
        $crate::source_laws!(
            $start, $crate::source_laws::LONG_LEASE, in rounds =>
            a_waiting_head_blocks_its_key_only
        );
    };
}

/// The reason why a round of a law proved nothing: the machine paused the test until a lease or a delay was over, or
/// until the source gave up a statement.
#[derive(Debug)]
pub struct Inconclusive(String);

impl From<StoreError> for Inconclusive {
    fn from(error: StoreError) -> Self {
        assert_ne!(error.kind(), FaultKind::Permanent, "{}", error.chain());
        Self(error.chain())
    }
}

/// Runs rounds of a law, each on a store of its own, until one of them proves something.
pub async fn until_conclusive<H: SourceHarness>(
    start: impl AsyncFn() -> H,
    round: impl AsyncFn(&H) -> Result<(), Inconclusive>,
) {
    let give_up = Instant::now() + 3 * DEADLINE;
    while let Err(Inconclusive(reason)) = round(&start().await).await {
        assert!(Instant::now() < give_up, "no round proved anything: {reason}");
    }
}

/// Ends a round that took longer than this.
fn within(limit: Duration, since: Instant) -> Result<(), Inconclusive> {
    let took = since.elapsed();
    if took < limit { Ok(()) } else { Err(Inconclusive(format!("it took {took:?} instead of less than {limit:?}"))) }
}

/// Neither the owner of the lease nor another owner claims the item again, even with concurrent claims.
pub async fn claim_never_returns_an_item_twice_within_a_lease<H: SourceHarness>(harness: &H) {
    let (one, other) = (harness.open().await, harness.open().await);
    for number in 0..30 {
        harness.insert(&number.to_string(), Duration::ZERO).await;
    }
    let mut seen = labels(harness, &claim_all(&one, 1).await);
    let deadline = Instant::now() + DEADLINE;
    while seen.len() < 30 && Instant::now() < deadline {
        let (a, b, c) = tokio::join!(one.claim(4), one.claim(3), other.claim(4));
        for claim in [a, b, c] {
            seen.extend(labels(harness, &claim.unwrap().items));
        }
    }
    seen.sort_by_key(|label| label.parse::<u32>().unwrap());
    assert_eq!(seen, (0..30).map(|number| number.to_string()).collect::<Vec<_>>(), "each item is claimed once");
    assert_nothing_claimable(harness, &one).await;
    assert_nothing_claimable(harness, &other).await;
}

/// A claim returns items in the order of their due times, and items of the same due time in the order of insertion.
pub async fn claim_returns_items_in_order<H: SourceHarness>(harness: &H) -> Result<(), Inconclusive> {
    let source = harness.open().await;
    let started = Instant::now();
    harness.insert("last", 6 * WAIT).await;
    harness.insert("late", WAIT).await;
    // Otherwise the item that was inserted first may also be due first.
    within(5 * WAIT, started)?;
    for number in 0..20 {
        harness.insert(&number.to_string(), Duration::ZERO).await;
    }
    let mut seen = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    while seen.len() < 22 && Instant::now() < deadline {
        seen.extend(labels(harness, &source.claim(7).await.unwrap().items));
        a_moment().await;
    }
    let at = |label: &str| seen.iter().position(|seen| seen == label);
    assert!(at("late") < at("last"), "{seen:?}");
    seen.retain(|label| label != "late" && label != "last");
    assert_eq!(seen, (0..20).map(|number| number.to_string()).collect::<Vec<_>>());
    Ok(())
}

/// A claim returns no more items than its limit, and no item before it is due. `next_due` is not later than that.
pub async fn claim_respects_the_limit_and_the_due_time<H: SourceHarness>(harness: &H) {
    let source = harness.open().await;
    for number in 0..5 {
        harness.insert(&number.to_string(), Duration::ZERO).await;
    }
    assert_eq!(claim_all(&source, 2).await.len(), 2);
    assert_eq!(source.claim(2).await.unwrap().items.len(), 2);
    assert_eq!(source.claim(2).await.unwrap().items.len(), 1);
    let started = Instant::now();
    harness.insert("late", WAIT).await;
    let claim = source.claim(10).await.unwrap();
    let (items, early) = (labels(harness, &claim.items), started.elapsed() < WAIT);
    assert!(items.is_empty() || !early, "{items:?} came {:?} after insertion", started.elapsed());
    assert!(claim.next_due.is_none_or(|wait| wait <= WAIT), "{:?}", claim.next_due);
    if items.is_empty() {
        let late = claim_one(harness, &source, "late").await;
        assert_eq!(late.attempt, 1);
    }
    assert_waited(started, WAIT);
}

/// Another owner claims an item whose lease has ended. Its attempts do not change.
pub async fn an_expired_lease_is_claimable_again<H: SourceHarness>(harness: &H) -> Result<(), Inconclusive> {
    let (one, other) = (harness.open().await, harness.open().await);
    harness.insert("item", Duration::ZERO).await;
    let started = Instant::now();
    let first = claim_one(harness, &one, "item").await;
    let second = claim_one(harness, &other, "item").await;
    assert_waited(started, one.lease());
    assert_eq!((first.attempt, second.attempt), (1, 1), "expiry does not count");
    // The same owner can also claim the item again, because it may have lost track of it.
    let third = claim_one(harness, &other, "item").await;
    assert_eq!(third.attempt, 1);
    assert_eq!(try_settle(&other, &second, Disposition::Done).await?, Settled::LostLease, "the older claim has ended");
    assert_eq!(try_settle(&other, &third, Disposition::Done).await?, Settled::Applied);
    Ok(())
}

/// An owner that lost its lease changes nothing.
pub async fn settle_by_a_stale_owner_is_lost_lease<H: SourceHarness>(harness: &H) -> Result<(), Inconclusive> {
    let (stale, owner) = (harness.open().await, harness.open().await);
    harness.insert("item", Duration::ZERO).await;
    let old = claim_one(harness, &stale, "item").await;
    let new = claim_one(harness, &owner, "item").await;
    for disposition in [Disposition::Done, Disposition::Dead(failure()), retry(Duration::ZERO, true)] {
        assert_eq!(try_settle(&stale, &old, disposition).await?, Settled::LostLease);
    }
    stale.release(&[&old]).await?;
    assert_eq!(try_settle(&owner, &new, retry(Duration::ZERO, true)).await?, Settled::Applied);
    // After the settlement, because a renewal may take over the whole store if the lease of its owner has ended.
    assert_eq!(stale.renew(&[&old]).await?, [Settled::LostLease]);
    assert_eq!(claim_one(harness, &owner, "item").await.attempt, 2);
    Ok(())
}

/// The second settlement of a claim changes nothing, even if the item was claimed again in between.
pub async fn settle_twice_is_lost_lease<H: SourceHarness>(harness: &H) {
    let source = harness.open().await;
    harness.insert("item", Duration::ZERO).await;
    let first = claim_one(harness, &source, "item").await;
    assert_eq!(settle(&source, &first, retry(Duration::ZERO, true)).await, Settled::Applied);
    assert_eq!(settle(&source, &first, Disposition::Done).await, Settled::LostLease);
    let second = claim_one(harness, &source, "item").await;
    assert_eq!(second.attempt, 2);
    assert_eq!(settle(&source, &first, Disposition::Dead(failure())).await, Settled::LostLease);
    assert_eq!(settle(&source, &second, Disposition::Done).await, Settled::Applied);
    assert_eq!(settle(&source, &second, retry(Duration::ZERO, true)).await, Settled::LostLease);
    assert_nothing_claimable(harness, &source).await;
}

/// Each renewal extends the lease to a whole lease from then on.
pub async fn leases_are_renewed<H: SourceHarness>(harness: &H) -> Result<(), Inconclusive> {
    let (owner, other) = (harness.open().await, harness.open().await);
    harness.insert("item", Duration::ZERO).await;
    let mut renewed = Instant::now();
    let claimed = claim_one(harness, &owner, "item").await;
    let enough = Instant::now() + owner.lease() * 5 / 2;
    while Instant::now() < enough {
        for source in [&owner, &other] {
            let items = source.claim(10).await?.items;
            within(owner.lease(), renewed)?;
            assert_eq!(labels(harness, &items), [""; 0], "claimed within a lease after a renewal");
        }
        let before = Instant::now();
        let answers = owner.renew(&[&claimed]).await?;
        within(owner.lease(), renewed)?;
        assert_eq!(answers, [Settled::Applied]);
        renewed = before;
        a_moment().await;
    }
    assert_eq!(try_settle(&owner, &claimed, Disposition::Done).await?, Settled::Applied);
    Ok(())
}

/// A released item can be claimed at once, and its attempts do not change.
pub async fn a_released_item_is_claimable_at_once<H: SourceHarness>(harness: &H) {
    let source = harness.open().await;
    harness.insert("item", Duration::ZERO).await;
    let first = claim_one(harness, &source, "item").await;
    source.release(&[&first]).await.unwrap();
    let again = source.claim(10).await.unwrap().items;
    assert_eq!(labels(harness, &again), ["item"]);
    assert_eq!(again[0].attempt, 1);
    assert_eq!(settle(&source, &first, Disposition::Done).await, Settled::LostLease, "the released claim has ended");
    assert_eq!(settle(&source, &again[0], Disposition::Done).await, Settled::Applied);
}

/// Another owner does not have to wait for the lease of an owner that released its claims and closed.
pub async fn a_clean_stop_releases_claims<H: SourceHarness>(harness: &H) {
    let (one, other) = (harness.open().await, harness.open().await);
    harness.insert("item", Duration::ZERO).await;
    let claimed = claim_one(harness, &one, "item").await;
    assert_nothing_claimable(harness, &other).await;
    one.release(&[&claimed]).await.unwrap();
    one.close().await.unwrap();
    let reclaimed = other.claim(10).await.unwrap().items;
    assert_eq!(labels(harness, &reclaimed), ["item"]);
    assert_eq!(reclaimed[0].attempt, 1);
}

/// A counted retry adds one attempt, and the item is not claimed before its delay is over.
pub async fn a_counted_retry_counts_and_waits<H: SourceHarness>(harness: &H) {
    let source = harness.open().await;
    harness.insert("item", Duration::ZERO).await;
    let mut claimed = claim_one(harness, &source, "item").await;
    for attempt in 1..=2 {
        assert_eq!(claimed.attempt, attempt);
        let started = Instant::now();
        assert_eq!(settle(&source, &claimed, retry(WAIT, true)).await, Settled::Applied);
        claimed = claim_one(harness, &source, "item").await;
        assert_waited(started, WAIT);
    }
    assert_eq!(claimed.attempt, 3);
}

/// After an uncounted retry, with or without a failure, the item waits for its delay and its attempts do not change.
pub async fn an_uncounted_retry_waits_only<H: SourceHarness>(harness: &H) {
    let source = harness.open().await;
    harness.insert("item", Duration::ZERO).await;
    let mut claimed = claim_one(harness, &source, "item").await;
    let snooze = Disposition::Retry { after: WAIT, counted: false, failure: None };
    for disposition in [retry(WAIT, false), snooze] {
        let started = Instant::now();
        assert_eq!(settle(&source, &claimed, disposition).await, Settled::Applied);
        claimed = claim_one(harness, &source, "item").await;
        assert_waited(started, WAIT);
        assert_eq!(claimed.attempt, 1);
    }
}

/// No owner can claim a dead item.
pub async fn dead_is_not_claimable<H: SourceHarness>(harness: &H) {
    settled_for_good(harness, Disposition::Dead(failure())).await;
}

/// No owner can claim an item that is done.
pub async fn done_is_not_claimable<H: SourceHarness>(harness: &H) {
    settled_for_good(harness, Disposition::Done).await;
}

async fn settled_for_good<H: SourceHarness>(harness: &H, disposition: Disposition) {
    let (one, other) = (harness.open().await, harness.open().await);
    harness.insert("item", Duration::ZERO).await;
    let claimed = claim_one(harness, &one, "item").await;
    assert_eq!(settle(&one, &claimed, disposition).await, Settled::Applied);
    assert_nothing_claimable(harness, &one).await;
    one.close().await.unwrap();
    assert_nothing_claimable(harness, &other).await;
}

/// Only one owner at a time has claims on the items of a key, and they are claimed in order.
pub async fn a_key_is_claimed_by_one_owner_at_a_time<H: KeyedSourceHarness>(harness: &H) {
    let (one, other) = (harness.open().await, harness.open().await);
    for (label, key) in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")] {
        harness.insert_keyed(label, key).await;
    }
    let head = claim_all(&one, 1).await;
    assert_eq!(labels(harness, &head), ["a1"]);
    assert!(head[0].key.is_some());
    assert_eq!(labels(harness, &other.claim(10).await.unwrap().items), ["b1"], "another owner has claimed key a");
    assert_eq!(settle(&one, &head[0], Disposition::Done).await, Settled::Applied);
    let mut rest = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    while rest.len() < 2 && Instant::now() < deadline {
        for claimed in other.claim(10).await.unwrap().items {
            rest.push(harness.label(&claimed.item));
            assert_eq!(settle(&other, &claimed, Disposition::Done).await, Settled::Applied);
        }
    }
    assert_eq!(rest, ["a2", "a3"]);
}

/// Items behind a waiting head wait as long as the head. Items of other keys do not wait.
pub async fn a_waiting_head_blocks_its_key_only<H: KeyedSourceHarness>(harness: &H) -> Result<(), Inconclusive> {
    let source = harness.open().await;
    for (label, key) in [("a1", "a"), ("a2", "a"), ("b1", "b")] {
        harness.insert_keyed(label, key).await;
    }
    let head = claim_all(&source, 1).await;
    assert_eq!(labels(harness, &head), ["a1"]);
    let started = Instant::now();
    assert_eq!(settle(&source, &head[0], retry(WAIT, true)).await, Settled::Applied);
    let mut seen = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    while seen.len() < 3 && Instant::now() < deadline {
        let items = source.claim(10).await?.items;
        if seen.is_empty() {
            // Otherwise the head may be due as well.
            within(WAIT, started)?;
        }
        for claimed in items {
            let label = harness.label(&claimed.item);
            if label != "b1" {
                assert_waited(started, WAIT);
            }
            seen.push(label);
            assert_eq!(settle(&source, &claimed, Disposition::Done).await, Settled::Applied);
        }
        a_moment().await;
    }
    assert_eq!(seen, ["b1", "a1", "a2"]);
    Ok(())
}

/// The items of a key are done in order, whichever owner claims them, whichever item fails, and whichever are released.
pub async fn a_key_keeps_its_order_through_retries<H: KeyedSourceHarness>(harness: &H) {
    let sources = [harness.open().await, harness.open().await];
    let labels: Vec<String> = (1..=12).map(|number| format!("a{number}")).collect();
    for label in &labels {
        harness.insert_keyed(label, "a").await;
    }
    let mut seen = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    for source in sources.iter().cycle() {
        if seen.len() == labels.len() || Instant::now() > deadline {
            break;
        }
        let items = source.claim(5).await.unwrap().items;
        let Some((head, rest)) = items.split_first() else {
            a_moment().await;
            continue;
        };
        let fails = head.attempt == 1 && seen.len() % 3 == 2;
        let disposition = if fails { retry(Duration::ZERO, true) } else { Disposition::Done };
        assert_eq!(settle(source, head, disposition).await, Settled::Applied);
        source.release(&rest.iter().collect::<Vec<_>>()).await.unwrap();
        if !fails {
            seen.push(harness.label(&head.item));
        }
    }
    assert_eq!(seen, labels);
}

fn failure() -> Failure {
    Failure::transient("503", "down")
}

fn retry(after: Duration, counted: bool) -> Disposition {
    Disposition::Retry { after, counted, failure: Some(failure()) }
}

async fn settle<S: Source>(source: &S, claimed: &Claimed<S::Item>, disposition: Disposition) -> Settled {
    try_settle(source, claimed, disposition).await.unwrap()
}

/// With a short lease, a source soon gives up a statement. The law cannot know if the statement took effect.
async fn try_settle<S: Source>(
    source: &S,
    claimed: &Claimed<S::Item>,
    disposition: Disposition,
) -> Result<Settled, StoreError> {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(7) };
    let settled = source.settle(&[settlement]).await?;
    assert_eq!(settled.len(), 1, "one result per settlement");
    Ok(settled[0])
}

fn labels<H: SourceHarness>(harness: &H, items: &[Claimed<<H::Source as Source>::Item>]) -> Vec<String> {
    items.iter().map(|claimed| harness.label(&claimed.item)).collect()
}

/// Waits until something is claimable, and claims at most `limit`.
async fn claim_all<S: Source>(source: &S, limit: usize) -> Vec<Claimed<S::Item>> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let claim = match source.claim(limit).await {
            // If such a claim took effect, its items become claimable when the source releases them or their lease
            // ends.
            Err(error) if error.kind() != FaultKind::Permanent => Claim::default(),
            claim => claim.unwrap(),
        };
        if !claim.items.is_empty() {
            assert!(claim.items.len() <= limit);
            return claim.items;
        }
        assert!(Instant::now() < deadline, "nothing became claimable");
        a_moment().await;
    }
}

/// Waits until exactly one item, with this label, is claimable, and claims it.
async fn claim_one<H: SourceHarness>(
    harness: &H,
    source: &H::Source,
    label: &str,
) -> Claimed<<H::Source as Source>::Item> {
    let mut items = claim_all(source, 10).await;
    assert_eq!(labels(harness, &items), [label]);
    items.remove(0)
}

async fn assert_nothing_claimable<H: SourceHarness>(harness: &H, source: &H::Source) {
    assert_eq!(labels(harness, &source.claim(10).await.unwrap().items), [""; 0]);
}

fn assert_waited(since: Instant, wait: Duration) {
    let waited = since.elapsed();
    assert!(waited + TOLERANCE >= wait, "claimable after {waited:?} instead of {wait:?}");
}

/// Sleeps between two claims.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

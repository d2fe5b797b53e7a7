//! Thousands of random runs. To repeat one seed in every mode:
//! `POSTHASTE_SEED=17 cargo test -p posthaste-backend-tests --test simulation`. With `POSTHASTE_TRACE=1` and `--nocapture` it
//! prints every step.

use posthaste_backend_tests::simulation::{GroupSabotage, GroupSummary, Sabotage, Summary, simulate, simulate_group};
use posthaste_core::outbox::{DeadHead, Mode};

/// The number of seeds in each mode; `POSTHASTE_SEEDS` overrides it.
const SEEDS: u64 = 1_500;
const MODES: [Mode; 4] =
    [Mode::SingleNode, Mode::MultiNode, Mode::Ordered(DeadHead::Block), Mode::Ordered(DeadHead::Skip)];

fn every_seed_keeps_the_promises(mode: Mode) {
    if let Ok(seed) = std::env::var("POSTHASTE_SEED") {
        let seed = seed.parse().expect("POSTHASTE_SEED is a number");
        let summary = simulate(seed, mode, Sabotage::None);
        println!("{:?}", summary.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")));
        return;
    }
    let seeds = std::env::var("POSTHASTE_SEEDS").map_or(SEEDS, |seeds| seeds.parse().expect("a number of seeds"));
    let mut total = Summary::default();
    for seed in 0..seeds {
        let summary = simulate(seed, mode, Sabotage::None)
            .unwrap_or_else(|violation| panic!("seed {seed}: {violation}\nto repeat it: POSTHASTE_SEED={seed}"));
        total.events += summary.events;
        total.deliveries += summary.deliveries;
        total.crashes += summary.crashes;
        total.duplicates += summary.duplicates;
        total.discarded += summary.discarded;
    }
    println!("{seeds} seeds: {total:?}");
    assert!(total.crashes > seeds as usize / 2, "too few crashes to show anything: {total:?}");
    assert!(total.duplicates > 0, "no crash happened after a delivery: {total:?}");
    assert!(total.discarded > 0, "no event was discarded: {total:?}");
}

#[test]
fn every_seed_keeps_the_promises_on_one_node() {
    every_seed_keeps_the_promises(Mode::SingleNode);
}

#[test]
fn every_seed_keeps_the_promises_on_many_nodes() {
    every_seed_keeps_the_promises(Mode::MultiNode);
}

#[test]
fn every_seed_keeps_the_promises_in_order_where_dead_events_block() {
    every_seed_keeps_the_promises(Mode::Ordered(DeadHead::Block));
}

#[test]
fn every_seed_keeps_the_promises_in_order_where_dead_events_are_skipped() {
    every_seed_keeps_the_promises(Mode::Ordered(DeadHead::Skip));
}

#[test]
fn every_seed_keeps_the_promises_in_a_group_that_reads_a_bus() {
    if let Ok(seed) = std::env::var("POSTHASTE_SEED") {
        let summary = simulate_group(seed.parse().expect("POSTHASTE_SEED is a number"), GroupSabotage::None);
        println!("{:?}", summary.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")));
        return;
    }
    let mut total = GroupSummary::default();
    for seed in 0..SEEDS {
        let summary = simulate_group(seed, GroupSabotage::None)
            .unwrap_or_else(|violation| panic!("seed {seed}: {violation}\nto repeat it: POSTHASTE_SEED={seed}"));
        total.records += summary.records;
        total.deliveries += summary.deliveries;
        total.duplicates += summary.duplicates;
        total.crashes += summary.crashes;
        total.released += summary.released;
    }
    println!("{SEEDS} seeds: {total:?}");
    assert!(total.duplicates > 0 && total.crashes > 0 && total.released > 0, "nothing happened: {total:?}");
}

#[test]
fn the_checker_finds_lost_and_repeated_records_of_a_group() {
    let caught = |sabotage, words: &str| {
        let is_caught =
            |seed| simulate_group(seed, sabotage).is_err_and(|violation| violation.to_string().contains(words));
        (0..40).filter(|seed| is_caught(*seed)).count()
    };
    assert!(caught(GroupSabotage::LoseOne, "is lost") >= 30);
    assert!(caught(GroupSabotage::GiveUpInFlight, "and again by") >= 10);
}

#[test]
fn a_seed_reproduces_its_run() {
    let run = || simulate_group(42, GroupSabotage::None).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(run(), run());
    for mode in MODES {
        let run = || simulate(42, mode, Sabotage::None).unwrap_or_else(|violation| panic!("{mode:?}: {violation}"));
        assert_eq!(run(), run(), "{mode:?}");
    }
}

/// The number of seeds whose run breaks a promise with a message that contains these words.
fn caught(mode: Mode, sabotage: Sabotage, seeds: u64, words: &str) -> usize {
    let is_caught = |seed| simulate(seed, mode, sabotage).is_err_and(|violation| violation.to_string().contains(words));
    (0..seeds).filter(|seed| is_caught(*seed)).count()
}

// Not every seed shows the sabotage: the second delivery may fail, or a lost lease may allow it.

#[test]
fn the_checker_finds_lost_and_uncommitted_events() {
    for mode in MODES {
        assert!(caught(mode, Sabotage::LoseOne, 40, "is lost") >= 30, "{mode:?}");
        assert!(caught(mode, Sabotage::CommitRollbacks, 40, "never committed") >= 10, "{mode:?}");
    }
}

#[test]
fn the_checker_finds_double_claims_and_broken_order() {
    for mode in MODES.into_iter().filter(|mode| mode.leases_rows()) {
        assert!(caught(mode, Sabotage::ClaimOneTwice, 40, "and again by") >= 20, "{mode:?}");
    }
    for mode in [Mode::Ordered(DeadHead::Block), Mode::Ordered(DeadHead::Skip)] {
        assert!(caught(mode, Sabotage::ForgetOrder, 40, " of key-") >= 20, "{mode:?}");
    }
}

#[test]
fn the_checker_finds_ignored_fencing_tokens() {
    assert!(caught(Mode::SingleNode, Sabotage::IgnoreFence, 40, "past its lease") >= 20);
    for mode in MODES.into_iter().filter(|mode| mode.leases_rows()) {
        assert!(caught(mode, Sabotage::IgnoreFence, 200, "without its fencing token") >= 3, "{mode:?}");
    }
}

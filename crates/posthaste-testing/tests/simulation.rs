//! Thousands of runs that nobody wrote. One seed again: `POSTHASTE_SEED=17 cargo test -p posthaste-testing --test simulation`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use posthaste_testing::simulation::{Sabotage, Summary, simulate};

const SEEDS: u64 = 1_000;

#[test]
fn every_seed_keeps_the_promises() {
    if let Ok(seed) = std::env::var("POSTHASTE_SEED") {
        let seed = seed.parse().expect("POSTHASTE_SEED is a number");
        println!("{:?}", simulate(seed, Sabotage::None).unwrap_or_else(|violation| panic!("seed {seed}: {violation}")));
        return;
    }
    let next = AtomicU64::new(0);
    let total = Mutex::new(Summary::default());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= SEEDS {
                        return;
                    }
                    let summary = simulate(seed, Sabotage::None)
                        .unwrap_or_else(|violation| panic!("seed {seed}: {violation}\nagain: POSTHASTE_SEED={seed}"));
                    let mut total = total.lock().expect("no seed has panicked");
                    total.items += summary.items;
                    total.deliveries += summary.deliveries;
                    total.crashes += summary.crashes;
                    total.duplicates += summary.duplicates;
                }
            });
        }
    });
    let total = total.into_inner().expect("no seed has panicked");
    println!("{SEEDS} seeds: {total:?}");
    assert!(total.crashes > SEEDS as usize / 2, "the storm is too mild to show anything: {total:?}");
    assert!(total.duplicates > 0, "crashes after delivery must happen, too: {total:?}");
}

#[test]
fn a_seed_repeats_itself() {
    let run = || format!("{:?}", simulate(42, Sabotage::None));
    assert_eq!(run(), run());
}

#[test]
fn the_checker_sees_what_it_must_see() {
    let caught = |sabotage| (0..40).filter(|seed| simulate(*seed, sabotage).is_err()).count();
    assert_eq!(caught(Sabotage::LoseOne), 40);
    // Not every time: the second delivery of the one may fail, or be excused by a lease that the storm took.
    let twice = caught(Sabotage::ClaimOneTwice);
    let order = caught(Sabotage::ForgetOrder);
    assert!(twice >= 10 && order >= 20, "caught {twice} claims that came twice and {order} broken orders of 40");
}

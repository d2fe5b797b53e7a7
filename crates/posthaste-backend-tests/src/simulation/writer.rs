use std::time::Duration;

use posthaste_core::outbox::{InTransaction, WriteError};
use posthaste_core::{Event, EventBuilder};
use tokio::time::{sleep, timeout};

use super::Sabotage;
use super::node::{AGGREGATE_TYPE, EVENT_TYPE, Node};
use super::store::{FaultyStore, commit};
use super::world::World;

/// A random plan for one transaction of a service.
struct Plan {
    events: Vec<EventBuilder>,
    /// True if the outbox begins the transaction and sees its end.
    is_seen: bool,
    /// The time between the last write and the end of the transaction.
    pause: Duration,
    end: End,
}

#[derive(Clone, Copy)]
enum End {
    Commit,
    /// The caller drops the commit after this time.
    CommitCutOff(Duration),
    Rollback,
    Drop,
}

/// Starts a transaction of 1 to 4 events on a node.
pub(super) fn start(world: &World, node: Node, chance: &mut fastrand::Rng) {
    if node.life.has_crashed() {
        return;
    }
    let is_keyed = if world.sabotage == Sabotage::ForgetOrder { 1.0 } else { 0.6 };
    let mut keys: Vec<Option<String>> = (0..chance.usize(1..=4))
        .map(|_| (chance.f64() < is_keyed).then(|| format!("key-{}", chance.usize(0..4))))
        .collect();
    let writing = world.start_writing(node.life.node, &mut keys);
    let plan = Plan::draw(world, keys, chance);
    let world = world.clone();
    tokio::spawn(async move {
        // After an error the service gives up, and its events must not be delivered.
        let _ = carry_out(&world, &node, plan).await;
        // Dropped only here, so that the world knows the transaction while it is open.
        drop(writing);
    });
}

impl Plan {
    fn draw(world: &World, keys: Vec<Option<String>>, chance: &mut fastrand::Rng) -> Self {
        let event = |key: Option<String>| {
            let event = Event::text(EVENT_TYPE, "{}").id(format!("event-{}", world.next_number()));
            let event = match key {
                Some(key) => event.aggregate(AGGREGATE_TYPE, key),
                None => event,
            };
            match chance.f64() < 0.1 {
                true => event.deliver_after(Duration::from_secs(chance.u64(1..20))),
                false => event,
            }
        };
        let events = keys.into_iter().map(event).collect();
        let pause = match chance.u32(0..10) {
            // Longer than a pre-claimed row stays claimed.
            0 => Duration::from_secs(chance.u64(10..60)),
            1..4 => Duration::from_millis(chance.u64(1..500)),
            _ => Duration::ZERO,
        };
        let end = match chance.u32(0..20) {
            0..2 => End::Rollback,
            2 => End::Drop,
            3 => End::CommitCutOff(Duration::from_millis(chance.u64(1..100))),
            _ => End::Commit,
        };
        Self { events, is_seen: chance.bool(), pause, end }
    }
}

async fn carry_out(world: &World, node: &Node, plan: Plan) -> Result<(), WriteError> {
    let Plan { events, is_seen, pause, end } = plan;
    if is_seen {
        let mut transaction = node.outbox.begin().await?;
        write(node, &mut transaction, events).await?;
        sleep(pause).await;
        match end {
            End::Commit => transaction.commit().await?,
            End::CommitCutOff(patience) => drop(timeout(patience, transaction.commit()).await),
            End::Rollback => transaction.rollback().await?,
            End::Drop => drop(transaction),
        }
        return Ok(());
    }
    let mut transaction = world.database.begin().await?;
    write(node, &mut transaction, events).await?;
    sleep(pause).await;
    match end {
        End::Commit => {
            commit(world, &node.life, transaction).await?;
            if world.draw() < 0.5 {
                node.outbox.committed();
            }
        }
        End::CommitCutOff(patience) => drop(timeout(patience, commit(world, &node.life, transaction)).await),
        End::Rollback | End::Drop => drop(transaction),
    }
    Ok(())
}

/// Writes the events in one batch, or one by one.
async fn write(
    node: &Node,
    transaction: &mut impl InTransaction<FaultyStore>,
    events: Vec<EventBuilder>,
) -> Result<(), WriteError> {
    match events.len() % 2 {
        0 => drop(node.outbox.write_all(transaction, events).await?),
        _ => {
            for event in events {
                node.outbox.write(transaction, event).await?;
            }
        }
    }
    Ok(())
}

//! Faults of the servers and the members of a bus, with real processes and real servers.
//! [`bus_faults!`](crate::bus_faults!) makes a test of every fault.
//!
//! The members of a group are processes ([`Member`]): each runs the engine's own relay on the bus and
//! keeps a diary. A publisher in the test publishes numbered records all the time. At the end the checker reads the
//! diaries, and a new consumer of the group reads what the group has not acked.

mod checker;
mod member;
mod member_faults;
mod publisher;
mod rest;
mod scene;
mod server_faults;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use posthaste_core::Progress;
use posthaste_core::bus::Bus;
use serde::{Deserialize, Serialize};

use crate::servers::{CrashableServer, Cutter};

pub use checker::{Fault, Faulty, History};
pub use member::{Delivered, Entry, Member, Place, Step, serve_if_started_as_a_member};
pub use member_faults::{
    a_killed_member_repeats_only_its_deliveries_in_flight, a_paused_member_repeats_only_its_deliveries_in_flight,
    members_that_come_and_go_repeat_nothing,
};
pub use scene::{Scene, deliveries};
pub use server_faults::{
    a_server_out_of_reach_for_longer_than_a_lease_loses_nothing, a_server_that_crashes_loses_and_repeats_nothing,
};

/// The number of partitions of the topic.
pub const PARTITIONS: u32 = 6;
/// Longer than any fault that a test makes.
pub const LONG_LEASE: Duration = Duration::from_secs(60);
/// A test waits for the end of this lease. A busy machine does not pause a process for as long.
pub const SHORT_LEASE: Duration = Duration::from_secs(5);

/// Where a bus is: all that a process needs to open it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Address {
    /// The URL of the server, or of the proxy in front of it.
    pub url: String,
    /// The names of the topic and of the group begin with this, because tests share a server.
    pub prefix: String,
}

impl Address {
    /// A server that only one test uses.
    pub fn of(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: String::new() }
    }

    /// The topic of the test.
    pub fn topic(&self) -> String {
        format!("{}orders", self.prefix)
    }

    /// The group of the test.
    pub fn group(&self) -> String {
        format!("{}readers", self.prefix)
    }
}

/// A bus that survives the faults.
#[async_trait]
pub trait FaultyBus: Send + Sync + 'static {
    /// True if an ack that was applied is durable. Otherwise it is durable a moment later.
    const ACKS_ARE_DURABLE: bool;

    /// A place on a server that the tests of this program share. No test crashes it.
    async fn shared() -> Address;

    /// A server for one test, and a proxy in front of it that every client uses.
    async fn start() -> (CrashableServer, Cutter);

    /// Opens the bus with topics of [`PARTITIONS`] partitions and with leases of this length.
    async fn open(address: &Address, lease: Duration) -> Arc<dyn Bus>;

    /// What the group of the test has done in its topic, as the server has recorded it.
    async fn done(address: &Address) -> Done;
}

/// The records that a group has done, by partition.
#[derive(Clone, Debug, Default)]
pub struct Done(pub BTreeMap<u32, Progress>);

impl Done {
    /// True if the record of this place is done.
    pub fn contains(&self, place: &Place) -> bool {
        self.0.get(&place.partition).is_some_and(|progress| progress.is_done(place.offset))
    }
}

/// Expands to one test per fault, and to the test that runs the members:
/// `bus_faults!(Kafka)` for a [`FaultyBus`] of that name.
#[macro_export]
macro_rules! bus_faults {
    ($bus:ty) => {
        /// Runs a member if this program was started as one, and does nothing otherwise.
        #[test]
        fn serve_when_started_as_a_member() {
            $crate::bus_faults::serve_if_started_as_a_member::<$bus>();
        }

        $crate::bus_faults!(
            $bus =>
            a_server_that_crashes_loses_and_repeats_nothing
            a_server_out_of_reach_for_longer_than_a_lease_loses_nothing
            a_killed_member_repeats_only_its_deliveries_in_flight
            a_paused_member_repeats_only_its_deliveries_in_flight
            members_that_come_and_go_repeat_nothing
        );
    };
    ($bus:ty => $($fault:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $fault() {
                $crate::bus_faults::$fault::<$bus>().await;
            }
        )*
    };
}

//! The laws of the stores of a hub, one function each. [`hub_laws!`](crate::hub_laws!) makes a test of every one.

pub mod audit;
pub mod bus_inspector;
pub mod channels;
pub mod dead_letters;
pub mod outbox;
pub mod quarantine;
pub mod registry;
pub mod schemas;

use std::time::{Duration, Instant};

use async_trait::async_trait;
use posthaste_core::hub_store::{HubOptions, HubStores};

/// A lease that never ends within a test, however busy the machine is.
pub const LEASE: Duration = Duration::from_secs(120);

/// One database on which stores are opened. Each law gets a fresh database, empty and up to date.
#[async_trait]
pub trait HubHarness: Send + Sync + Sized {
    /// A fresh database.
    async fn start() -> Self;

    /// Opens the stores of one more process. Like real processes, they share only the database, and the leases of other
    /// processes stay valid.
    async fn open(&self, options: HubOptions) -> HubStores;
}

/// Removes until it has removed this many, and returns how many each call removed. Rows count as old only when the
/// clock of the database has moved on.
async fn remove(count: u64, mut remove: impl AsyncFnMut() -> u64) -> Vec<u64> {
    let (mut removed, deadline) = (Vec::new(), Instant::now() + LEASE);
    while removed.iter().sum::<u64>() < count {
        assert!(Instant::now() < deadline, "removed {removed:?} of {count}");
        removed.extend(Some(remove().await).filter(|some| *some > 0));
    }
    assert_eq!((removed.iter().sum::<u64>(), remove().await), (count, 0), "{removed:?}");
    removed
}

/// The options of most laws.
pub fn options() -> HubOptions {
    HubOptions { lease: LEASE, max_channels: 100, partitions: 1, is_ordered: false }
}

/// Expands to one test for each law of the stores of a hub: `hub_laws!(Harness)`.
#[macro_export]
macro_rules! hub_laws {
    ($harness:ty) => {
        $crate::source_laws!($crate::hub_laws::dead_letters::DeadLetterHarness::<$harness>::start);
        $crate::hub_laws!(
            $harness, dead_letters =>
            a_delivery_is_inserted_once
            each_subscription_is_claimed_by_itself
            scheduled_retries_count_and_leave_a_history
            a_replay_is_one_attempt_beside_the_schedule
            a_scheduled_success_completes_a_replay_requested_meanwhile
            closing_releases_the_claims_of_this_owner_only
            a_settlement_of_an_earlier_claim_changes_nothing
            schedules_end_where_the_limit_was_lowered
            a_permanent_failure_is_inserted_as_failed
            lists_are_filtered_and_sorted
            a_cursor_continues_where_the_page_ended
            processed_dead_letters_are_removed_with_their_history
        );
        $crate::hub_laws!(
            $harness, audit =>
            entries_are_kept_unchanged
            an_entry_is_kept_once
            audit_lists_are_filtered_and_newest_first
            a_page_of_the_audit_continues_after_its_cursor
            the_trail_of_an_event_is_oldest_first
            expired_audit_entries_are_removed_oldest_first
        );
        $crate::hub_laws!(
            $harness, outbox =>
            only_done_rows_are_removed_by_their_age
            rows_are_removed_once_by_several_processes
            the_id_of_a_removed_row_is_new_again
        );
        $crate::hub_laws!(
            $harness, registry =>
            definitions_are_made_changed_and_removed
            subscriptions_are_made_changed_and_removed
            every_change_and_nothing_else_moves_the_version
            creating_the_same_subscription_again_returns_the_existing_one
            a_page_continues_after_an_id
            sealed_credentials_are_remembered
        );
        $crate::hub_laws!(
            $harness, channels =>
            the_same_event_again_is_known_and_another_with_its_id_is_a_conflict
            an_atomic_batch_is_stored_whole_or_not_at_all
            a_type_owns_its_topic_from_its_first_stored_event
            no_more_channels_are_recorded_than_the_limit
            an_owner_survives_a_restart
            a_paused_channel_stays_paused
        );
        $crate::schema_laws!(<$harness as $crate::hub_laws::HubHarness>::start().await);
        $crate::bus_inspector_laws!(<$harness as $crate::hub_laws::HubHarness>::start().await);
        $crate::quarantine_laws!(<$harness as $crate::hub_laws::HubHarness>::start().await);
    };
    ($harness:ty, $role:ident => $($law:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                let harness = <$harness as $crate::hub_laws::HubHarness>::start().await;
                $crate::hub_laws::$role::$law(&harness).await;
            }
        )*
    };
}

//! The name of every metric. `docs/metrics.md` says what each one counts.
//!
//! Those of a relay and of the library begin with a prefix that a service can choose; the others always begin with
//! `posthaste_`.

/// The full name of a metric with a prefix of the service's choice.
pub fn prefixed(prefix: &str, name: &str) -> String {
    format!("{prefix}_{name}")
}

// Relays and the library, with a prefix.

/// Items that went through the hot queue.
pub const ENQUEUE_HOT: &str = "enqueue_hot_total";
/// Items that were not hot because the hot queue was full.
pub const ENQUEUE_HOT_DROPPED: &str = "enqueue_hot_dropped_total";
/// Items that were not hot because they are delayed.
pub const ENQUEUE_HOT_SKIPPED_DELAYED: &str = "enqueue_hot_skipped_delayed_total";
/// Items that were claimed from the source.
pub const ENQUEUE_COLD: &str = "enqueue_cold_total";
/// Deliveries that succeeded.
pub const DISPATCH_SUCCESS: &str = "dispatch_success_total";
/// Attempts that failed and are retried.
pub const DISPATCH_FAILURE: &str = "dispatch_failure_total";
/// Items that were given up.
pub const DISPATCH_DEAD: &str = "dispatch_dead_total";
/// Items that were snoozed.
pub const DISPATCH_DEFERRED: &str = "dispatch_deferred_total";
/// How long an attempt took.
pub const DISPATCH_DURATION: &str = "dispatch_duration_seconds";
/// From when an event occurred to its delivery.
pub const DISPATCH_LATENCY: &str = "dispatch_latency_seconds";
/// Claims that were lost before they were settled.
pub const LOST_LEASES: &str = "lost_leases_total";
/// Settlements that the store refused.
pub const SETTLE_REFUSED: &str = "settle_refused_total";
/// Items in flight.
pub const IN_FLIGHT: &str = "in_flight";
/// Outcomes that are known and not settled, without attempts that could not be made.
pub const UNSETTLED: &str = "unsettled";
/// Runs that wait in the hot queue.
pub const QUEUE_HOT_DEPTH: &str = "queue_hot_depth";
/// Runs that wait in the cold queue.
pub const QUEUE_COLD_DEPTH: &str = "queue_cold_depth";
/// How long the oldest due item has been waiting.
pub const LAG_OLDEST: &str = "lag_oldest_ms";
/// Panics of a task.
pub const TASK_PANICS: &str = "task_panics_total";

// The hub, always under these names.

/// How long the oldest due item of a relay has been waiting.
pub const HUB_LAG_OLDEST: &str = "posthaste_lag_oldest_ms";
/// Panics of a task of the hub.
pub const HUB_TASK_PANICS: &str = "posthaste_task_panics_total";
/// 1 while a relay makes no progress although work waits.
pub const RELAY_STALLED: &str = "posthaste_relay_stalled";
/// Restarts of a relay that made no progress.
pub const RELAY_RESTARTS: &str = "posthaste_relay_restarts_total";
/// Events that no subscription matched.
pub const UNMATCHED: &str = "posthaste_unmatched_total";
/// Records that were quarantined.
pub const QUARANTINED_TOTAL: &str = "posthaste_quarantined_total";
/// Quarantined records that an operator replayed.
pub const QUARANTINE_REPLAYED: &str = "posthaste_quarantine_replayed_total";
/// Quarantined records that an operator discarded.
pub const QUARANTINE_DISCARDED: &str = "posthaste_quarantine_discarded_total";
/// Quarantined records that were removed because of their age, and that no operator had replayed or discarded.
pub const QUARANTINE_EXPIRED: &str = "posthaste_quarantine_expired_total";
/// Records in quarantine.
pub const QUARANTINED: &str = "posthaste_quarantined";
/// Records of a topic that a group has not acked.
pub const BACKLOG: &str = "posthaste_backlog";
/// Partitions that a consumer does not read, because too many of their records were done out of order.
pub const PAUSED_PARTITIONS: &str = "posthaste_paused_partitions";
/// Dead letters by status.
pub const DLT_DEPTH: &str = "posthaste_dlt_depth";
/// Rows and records that were removed because of their age.
pub const RETENTION_REMOVED: &str = "posthaste_retention_removed_total";
/// When expired data was last removed completely.
pub const RETENTION_LAST_RUN: &str = "posthaste_retention_last_run_timestamp_seconds";
/// The size of the write-ahead log of a SQLite file.
pub const SQLITE_WAL_BYTES: &str = "posthaste_sqlite_wal_bytes";
/// Rows that cannot be read.
pub const UNREADABLE_ROWS: &str = "posthaste_unreadable_rows_total";
/// 1 if a source can be read, 0 if not.
pub const SOURCE_UP: &str = "posthaste_source_up";
/// How long the oldest due event of a source has been waiting.
pub const SOURCE_LAG_OLDEST: &str = "posthaste_source_lag_oldest_ms";

//! O: the metrics and their names.

use std::time::Duration;

use posthaste::{Outbox, Settings, StartError};

use crate::harness::{Calls, Gate, Harness, Metrics, all_done, events, on_every_store, until, write};

on_every_store! {
    o1_every_metric_has_its_name_and_prefix,
    o2_after_close_gauges_are_zero_and_nothing_is_counted,
}

const METRIC_NAMES: [&str; 17] = [
    "dispatch_dead_total",
    "dispatch_deferred_total",
    "dispatch_duration_seconds",
    "dispatch_failure_total",
    "dispatch_latency_seconds",
    "dispatch_success_total",
    "enqueue_cold_total",
    "enqueue_hot_dropped_total",
    "enqueue_hot_skipped_delayed_total",
    "enqueue_hot_total",
    "in_flight",
    "lag_oldest_ms",
    "lost_leases_total",
    "queue_cold_depth",
    "queue_hot_depth",
    "settle_refused_total",
    "unsettled",
];

async fn o1_every_metric_has_its_name_and_prefix<H: Harness>(db: H) {
    let documented = include_str!("../../../../docs/metrics.md");
    for prefix in ["posthaste", "shop_outbox"] {
        let (calls, metrics) = (Calls::default(), Metrics::default());
        let listening = metrics.listening();
        let settings = Settings { metrics_prefix: prefix.to_owned(), ..Settings::default() };
        let builder = Outbox::new(db.pool().await).settings(settings).table(format!("o1_{prefix}"));
        let outbox = builder.listeners(calls.listeners()).start().await.unwrap();
        drop(listening);
        assert_eq!(metrics.names(), METRIC_NAMES.map(|name| format!("{prefix}_{name}")));
        let ids = write(&outbox, &events(2)).await;
        all_done(&outbox, &ids).await;
        until("both are counted", async || metrics.counter(&format!("{prefix}_dispatch_success_total")) == 2).await;
        outbox.close().await;
    }
    for name in METRIC_NAMES {
        assert!(documented.contains(&format!("`posthaste_{name}`")), "docs/metrics.md does not list {name}");
    }
    for bad in ["", "shop.", "shop-outbox", "1shop", "shop outbox"] {
        let settings = Settings { metrics_prefix: bad.to_owned(), ..Settings::default() };
        let refused = Outbox::new(db.pool().await).settings(settings).on("t", |_| async {}).start().await;
        assert!(matches!(refused.err(), Some(StartError::Setting(bad)) if bad.setting() == "metrics_prefix"));
    }
}

async fn o2_after_close_gauges_are_zero_and_nothing_is_counted<H: Harness>(db: H) {
    let (calls, gate, metrics) = (Calls::default(), Gate::closed(), Metrics::default());
    let listening = metrics.listening();
    let settings = Settings { workers: 1, drain: Duration::from_millis(10), ..Settings::default() };
    let builder = Outbox::new(db.pool().await).settings(settings).listeners(calls.gated_listeners(&gate));
    let outbox = builder.start().await.unwrap();
    drop(listening);
    write(&outbox, &events(3)).await;
    calls.wait_for(1).await;
    assert_eq!(metrics.gauge("posthaste_in_flight"), Some(3.0));
    outbox.close().await;
    for gauge in ["in_flight", "queue_hot_depth", "queue_cold_depth", "unsettled"] {
        assert_eq!(metrics.gauge(&format!("posthaste_{gauge}")), Some(0.0), "{gauge}");
    }
    let counted = metrics.counter("posthaste_enqueue_hot_total");
    write(&outbox, &events(1)).await;
    assert_eq!(metrics.counter("posthaste_enqueue_hot_total"), counted, "a closed outbox has no hot queue");
    // The next outbox starts with its own metrics.
    let (calls, fresh) = (Calls::default(), Metrics::default());
    let listening = fresh.listening();
    let outbox = Outbox::new(db.pool().await).listeners(calls.listeners()).start().await.unwrap();
    drop(listening);
    calls.wait_for(4).await;
    until("all are counted", async || fresh.counter("posthaste_dispatch_success_total") == 4).await;
    outbox.close().await;
    assert_eq!(metrics.counter("posthaste_dispatch_success_total"), 0);
    gate.open();
}

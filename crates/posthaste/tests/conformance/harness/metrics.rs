use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, Gauge, Histogram, HistogramFn, Key, KeyName, LocalRecorderGuard, Metadata, Recorder, SharedString, Unit,
};

/// Collects the metrics of an outbox that is started while [`listening`](Self::listening).
///
/// Clones share the collected values.
#[derive(Clone, Default)]
pub struct Metrics(Arc<Mutex<Found>>);

#[derive(Default)]
struct Found {
    counters: BTreeMap<String, Arc<AtomicU64>>,
    gauges: BTreeMap<String, Arc<AtomicU64>>,
    histograms: BTreeMap<String, Arc<Samples>>,
}

#[derive(Default)]
pub struct Samples(Mutex<Vec<f64>>);

impl HistogramFn for Samples {
    fn record(&self, value: f64) {
        self.0.lock().unwrap().push(value);
    }
}

impl Metrics {
    /// Collects the metrics that this thread registers. The future of a test never moves to another thread.
    pub fn listening(&self) -> LocalRecorderGuard<'_> {
        metrics::set_default_local_recorder(self)
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.0.lock().unwrap().counters.get(name).map_or(0, |counter| counter.load(Ordering::Acquire))
    }

    /// `None` if no such gauge was registered.
    pub fn gauge(&self, name: &str) -> Option<f64> {
        self.0.lock().unwrap().gauges.get(name).map(|gauge| f64::from_bits(gauge.load(Ordering::Acquire)))
    }

    pub fn samples(&self, name: &str) -> Vec<f64> {
        let found = self.0.lock().unwrap();
        found.histograms.get(name).map(|samples| samples.0.lock().unwrap().clone()).unwrap_or_default()
    }

    /// The names of all metrics, sorted.
    pub fn names(&self) -> Vec<String> {
        let found = self.0.lock().unwrap();
        let all = found.counters.keys().chain(found.gauges.keys()).chain(found.histograms.keys());
        let mut names: Vec<String> = all.cloned().collect();
        names.sort();
        names
    }
}

impl Recorder for Metrics {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut found = self.0.lock().unwrap();
        Counter::from_arc(found.counters.entry(key.name().to_owned()).or_default().clone())
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        let mut found = self.0.lock().unwrap();
        Gauge::from_arc(found.gauges.entry(key.name().to_owned()).or_default().clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut found = self.0.lock().unwrap();
        Histogram::from_arc(found.histograms.entry(key.name().to_owned()).or_default().clone())
    }
}

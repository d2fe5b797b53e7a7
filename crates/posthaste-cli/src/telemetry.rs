use std::io::IsTerminal;
use std::sync::OnceLock;

use anyhow::Context;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

/// Histogram buckets: from a hand-over inside the process to a request that almost times out.
const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Logs to stderr, because stdout is for data.
pub fn start_logging(filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(filter).context("telemetry.log is not a log filter")?;
    let logging = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let logging = logging.with_ansi(std::io::stderr().is_terminal()).with_target(false);
    logging.try_init().map_err(|error| anyhow::anyhow!(error).context("logging cannot start"))
}

/// The metrics recorder for `/metrics`. All servers in a process share one.
pub fn metrics() -> Result<PrometheusHandle, BuildError> {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    if let Some(handle) = RECORDER.get() {
        return Ok(handle.clone());
    }
    let builder = PrometheusBuilder::new();
    let builder = builder.set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?;
    let handle = builder.install_recorder()?;
    Ok(RECORDER.get_or_init(|| handle).clone())
}

//! `posthaste bench`: throughput on this machine, compared with the simplest code that does the same.

mod drain;
mod embedded;
mod engine;
mod idle;
mod isolation;
mod matching;
mod server;
mod sources;
mod subscriber;

use anyhow::Context;
use serde::Serialize;

use crate::output::{self, Table};

#[derive(clap::Args)]
pub struct BenchOptions {
    /// What to measure [default: everything but isolation, matching and sources]
    #[arg(value_enum)]
    name: Option<Name>,
    /// Do a tenth of the work, for a rough result
    #[arg(long)]
    quick: bool,
    /// Of isolation, measure only the rows whose names contain this text, such as "small events, 12 of 1000 hang"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// The engine alone, with a source in memory
    Engine,
    /// A backlog in SQLite, delivered to a listener that does nothing
    Drain,
    /// The whole pipeline: from an HTTP publish to a subscriber in the same process
    Embedded,
    /// Startup time, memory and CPU of an idle server
    Idle,
    /// How bad endpoints affect the healthy ones
    Isolation,
    /// The cost of matching an event to 1 to 100,000 subscriptions
    Matching,
    /// From the outbox tables of 1, 10 and 100 services to the bus
    Sources,
}

/// One measured value.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Figure {
    bench: &'static str,
    what: String,
    value: f64,
    unit: &'static str,
    /// The value of the simplest code in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw: Option<Raw>,
    /// The value that we aim for.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<Target>,
}

#[derive(Serialize)]
struct Raw {
    what: &'static str,
    value: f64,
    /// Ours divided by raw.
    ratio: f64,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl Figure {
    fn new(bench: &'static str, what: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { bench, what: what.into(), value, unit, raw: None, target: None }
    }

    fn raw(mut self, what: &'static str, value: f64) -> Self {
        self.raw = Some(Raw { what, value, ratio: self.value / value });
        self
    }

    fn at_least(mut self, value: f64) -> Self {
        self.target = Some(Target::AtLeast(value));
        self
    }

    fn at_most(mut self, value: f64) -> Self {
        self.target = Some(Target::AtMost(value));
        self
    }

    fn is_reached(&self) -> Option<bool> {
        self.target.map(|target| match target {
            Target::AtLeast(least) => self.value >= least,
            Target::AtMost(most) => self.value <= most,
        })
    }
}

/// Runs the benchmarks. Prints one JSON object to stdout and a table for people to stderr.
pub async fn run(options: BenchOptions) -> anyhow::Result<()> {
    if options.only.is_some() && options.name != Some(Name::Isolation) {
        anyhow::bail!("--only selects rows of isolation: run `posthaste bench isolation --only TEXT`");
    }
    let selected = |name| options.name.is_none_or(|only| only == name);
    let mut figures = Vec::new();
    // First, while this process itself uses little memory and CPU.
    if selected(Name::Idle) {
        figures.extend(measure("idle", idle::run(options.quick)).await?);
    }
    if selected(Name::Engine) {
        figures.extend(measure("engine", engine::run(options.quick)).await?);
    }
    if selected(Name::Drain) {
        figures.extend(measure("drain", drain::run(options.quick)).await?);
    }
    if selected(Name::Embedded) {
        figures.extend(measure("embedded", embedded::run(options.quick)).await?);
    }
    if options.name == Some(Name::Matching) {
        figures.extend(measure("matching", matching::run(options.quick)).await?);
    }
    if options.name == Some(Name::Sources) {
        figures.extend(measure("sources", sources::run(options.quick)).await?);
    }
    // Only by its name: it takes minutes.
    if options.name == Some(Name::Isolation) {
        figures.extend(measure("isolation", isolation::run(options.quick, options.only.as_deref())).await?);
    }
    output::say(table(&figures));
    let report =
        serde_json::json!({ "version": env!("CARGO_PKG_VERSION"), "quick": options.quick, "figures": figures });
    output::print(format!("{report}\n"))
}

async fn measure(name: &str, bench: impl Future<Output = anyhow::Result<Vec<Figure>>>) -> anyhow::Result<Vec<Figure>> {
    output::say(format_args!("measuring {name} …"));
    bench.await.with_context(|| format!("bench {name} failed"))
}

fn table(figures: &[Figure]) -> Table {
    let mut table = Table::new(["bench", "what", "measured", "target", "raw", "ours/raw"]);
    for figure in figures {
        let reached = match figure.is_reached() {
            Some(true) => "ok",
            Some(false) => "MISSED",
            None => "",
        };
        let target = match figure.target {
            Some(Target::AtLeast(value)) => format!("≥ {} {reached}", number(value)),
            Some(Target::AtMost(value)) => format!("≤ {} {reached}", number(value)),
            None => String::new(),
        };
        let (raw, ratio) = match &figure.raw {
            Some(raw) => (format!("{} ({})", number(raw.value), raw.what), format!("{:.2}", raw.ratio)),
            None => Default::default(),
        };
        let measured = format!("{} {}", number(figure.value), figure.unit);
        table.row([figure.bench.to_owned(), figure.what.clone(), measured, target, raw, ratio]);
    }
    table
}

fn number(value: f64) -> String {
    match value {
        _ if value >= 10_000.0 => format!("{:.0}k", value / 1_000.0),
        _ if value >= 100.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

/// How many per second.
fn rate(count: usize, took: std::time::Duration) -> f64 {
    count as f64 / took.as_secs_f64()
}

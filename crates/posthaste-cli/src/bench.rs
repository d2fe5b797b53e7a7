//! `posthaste bench`: what this machine reaches, each figure beside the plainest code that does the same.

mod drain;
mod embedded;
mod engine;
mod idle;
mod subscriber;

use anyhow::Context;
use serde::Serialize;

use crate::output::{self, Table};

#[derive(clap::Args)]
pub struct BenchOptions {
    /// What to measure [default: everything]
    #[arg(value_enum)]
    name: Option<Name>,
    /// A tenth of the work: a first impression
    #[arg(long)]
    quick: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// The engine alone, on a source in memory
    Engine,
    /// A backlog in SQLite, drained to a listener that does nothing
    Drain,
    /// From a publish by HTTP to a subscriber in the same process
    Embedded,
    /// Start, memory and CPU of a server that has nothing to do
    Idle,
}

/// One figure.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Figure {
    bench: &'static str,
    what: String,
    value: f64,
    unit: &'static str,
    /// What the plainest code reached in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    raw: Option<Raw>,
    /// What we want it to be.
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

/// Measures; one JSON object on stdout, a table for people on stderr.
pub async fn run(options: BenchOptions) -> anyhow::Result<()> {
    let wanted = |name| options.name.is_none_or(|only| only == name);
    let mut figures = Vec::new();
    // First, while this process is small and quiet itself.
    if wanted(Name::Idle) {
        figures.extend(measure("idle", idle::run(options.quick)).await?);
    }
    if wanted(Name::Engine) {
        figures.extend(measure("engine", engine::run(options.quick)).await?);
    }
    if wanted(Name::Drain) {
        figures.extend(measure("drain", drain::run(options.quick)).await?);
    }
    if wanted(Name::Embedded) {
        figures.extend(measure("embedded", embedded::run(options.quick)).await?);
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

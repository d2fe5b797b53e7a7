//! The report of a benchmark: figures, each beside one that was measured in the same run.

use serde_json::{Value, json};

/// The figures of one run.
pub struct Report {
    request: Vec<String>,
    figures: Vec<Value>,
}

/// Repeated measurements, each with the measurement that it is compared with.
pub struct Rounds(Vec<(f64, f64)>);

impl Rounds {
    /// Measures both sides in turn.
    pub async fn measure(rounds: usize, ours: impl AsyncFn() -> f64, raw: impl AsyncFn() -> f64) -> Self {
        let mut measured = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let raw = raw().await;
            let ours = ours().await;
            eprintln!("  {ours:.1}, raw {raw:.1}: {:.2}", ours / raw);
            measured.push((ours, raw));
        }
        Self(measured)
    }
}

/// The target of a figure.
pub enum Aim {
    /// The figure is not lower.
    AtLeast(f64),
    /// The figure is not higher.
    AtMost(f64),
}

impl Report {
    /// A report of the figures that were asked for by name.
    pub fn new(request: Vec<String>) -> Self {
        Self { request, figures: Vec::new() }
    }

    /// True if a figure is to be measured: without arguments all but the `large` ones, otherwise those whose names
    /// begin with an argument.
    pub fn wants(&self, name: &str) -> bool {
        match self.request.is_empty() {
            true => !name.starts_with("large"),
            false => self.request.iter().any(|request| name.starts_with(request.as_str())),
        }
    }

    /// Tells a person what is being measured.
    pub fn saying(&self, what: &str) {
        eprintln!("measuring {what} …");
    }

    /// A figure without a comparison.
    pub fn figure(&mut self, name: &str, value: f64, unit: &str, aim: Option<Aim>) {
        let reached = aim.as_ref().map(|aim| is_reached(value, aim));
        self.figures
            .push(json!({ "name": name, "value": value, "unit": unit, "aim": spelt(&aim), "reached": reached }));
        eprintln!("{name:<62} {value:>12.1} {unit:<10} {}", verdict(&aim, reached));
    }

    /// A figure that is judged by its ratio to the comparison. The ratio is the median of all pairs, because other load
    /// on the machine affects both measurements of a pair.
    pub fn ratio(&mut self, name: &str, Rounds(rounds): Rounds, unit: &str, aim: Option<Aim>) {
        let ours = median(rounds.iter().map(|(ours, _)| *ours));
        let raw = median(rounds.iter().map(|(_, raw)| *raw));
        let ratio = median(rounds.iter().map(|(ours, raw)| ours / raw));
        let reached = aim.as_ref().map(|aim| is_reached(ratio, aim));
        self.figures.push(json!({
            "name": name, "value": ours, "raw": raw, "ratio": ratio, "unit": unit, "aim": spelt(&aim), "reached": reached,
            "rounds": rounds,
        }));
        eprintln!("{name:<62} {ours:>12.1} {unit:<10} raw {raw:>10.1} ratio {ratio:.2} {}", verdict(&aim, reached));
    }

    /// Prints all figures as one JSON object.
    pub fn print(&self) {
        println!("{}", json!({ "version": env!("CARGO_PKG_VERSION"), "figures": self.figures }));
    }
}

fn is_reached(value: f64, aim: &Aim) -> bool {
    match aim {
        Aim::AtLeast(least) => value >= *least,
        Aim::AtMost(most) => value <= *most,
    }
}

fn spelt(aim: &Option<Aim>) -> Option<String> {
    aim.as_ref().map(|aim| match aim {
        Aim::AtLeast(least) => format!("at least {least}"),
        Aim::AtMost(most) => format!("at most {most}"),
    })
}

fn verdict(aim: &Option<Aim>, reached: Option<bool>) -> String {
    match (spelt(aim), reached) {
        (Some(aim), Some(true)) => format!("({aim}: reached)"),
        (Some(aim), _) => format!("({aim}: MISSED)"),
        _ => String::new(),
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

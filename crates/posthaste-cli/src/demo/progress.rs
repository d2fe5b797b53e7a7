use std::io::{self, IsTerminal};
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use posthaste_core::lock;
use tokio::time::Instant;

use super::DeadLetterCount;
use crate::output::say;

/// Without a terminal, the shortest time between two lines of progress.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Shows the progress of the demo: as bars on a terminal, otherwise as lines of text.
pub struct Progress {
    events: u64,
    names: [&'static str; 3],
    form: Form,
}

enum Form {
    Bars { all: MultiProgress, published: ProgressBar, delivered: [ProgressBar; 3] },
    Lines(Mutex<Lines>),
}

#[derive(Default)]
struct Lines {
    written: Option<Instant>,
    last: String,
    /// The newest line, if it was too soon after the last one to write it.
    due: Option<String>,
}

impl Progress {
    pub fn new(events: u64, names: [&'static str; 3]) -> Self {
        let form = match io::stderr().is_terminal() {
            true => bars(events, names),
            false => Form::Lines(Mutex::default()),
        };
        Self { events, names, form }
    }

    /// `arrived` and `waiting` have one entry for each subscriber; `waiting` counts undelivered dead letters.
    pub fn show(&self, events_published: u64, arrived: [u64; 3], waiting: [DeadLetterCount; 3]) {
        match &self.form {
            Form::Bars { published, delivered, .. } => {
                published.set_position(events_published);
                for ((bar, arrived), waiting) in delivered.iter().zip(arrived).zip(waiting) {
                    bar.set_position(arrived);
                    bar.set_message(dead_letters(waiting));
                }
            }
            Form::Lines(lines) => {
                let mut line = format!("published {events_published}/{}", self.events);
                for ((name, arrived), waiting) in self.names.iter().zip(arrived).zip(waiting) {
                    line += &format!(" · {name} {arrived}");
                    if waiting.count > 0 {
                        line += &format!(" ({})", dead_letters(waiting));
                    }
                }
                let mut lines = lock(lines);
                lines.due = (lines.last != line).then_some(line);
                if lines.written.is_none_or(|written| written.elapsed() >= LINE_INTERVAL) {
                    lines.write_due();
                }
            }
        }
    }

    /// Prints a message above the bars.
    pub fn message(&self, text: &str) {
        match &self.form {
            // A closed terminal is no reason to fail.
            Form::Bars { all, .. } => drop(all.println(format!("  {text}"))),
            Form::Lines(_) => say(text),
        }
    }

    /// Leaves the final state on the screen.
    pub fn finish(&self) {
        match &self.form {
            Form::Bars { published, delivered, .. } => {
                published.abandon();
                delivered.iter().for_each(ProgressBar::abandon);
                // End the line of the last bar.
                say("");
            }
            Form::Lines(lines) => lock(lines).write_due(),
        }
    }
}

impl Lines {
    fn write_due(&mut self) {
        if let Some(line) = self.due.take() {
            say(&line);
            self.written = Some(Instant::now());
            self.last = line;
        }
    }
}

fn bars(events: u64, names: [&'static str; 3]) -> Form {
    let all = MultiProgress::new();
    let add = |name: &'static str, colour: &str| {
        let width = events.to_string().len();
        let template = format!("  {{prefix:<10}} {{bar:40.{colour}/dim}} {{pos:>{width}}} / {events}  {{msg:.red}}");
        // An invalid template is a bug in this file; the default bar is better than none.
        let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(events).with_style(style.progress_chars("━━─")).with_prefix(name);
        all.add(bar)
    };
    let published = add("published", "white");
    let [healthy, flaky, down] = names;
    let delivered = [add(healthy, "green"), add(flaky, "yellow"), add(down, "magenta")];
    Form::Bars { all, published, delivered }
}

fn dead_letters(waiting: DeadLetterCount) -> String {
    match waiting.count {
        0 => String::new(),
        1 => "1 dead letter".to_owned(),
        _ => format!("{waiting} dead letters"),
    }
}

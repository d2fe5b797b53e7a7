mod input;

use std::fs::File;
use std::io::{self, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use posthaste_api::{BatchItem, BatchOut, EventIn, Headers};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use crate::client::Client;
use crate::exit::UsageError;
use crate::output::{Output, Table, print, say};
use crate::subscriptions::name_and_value;

use input::Entry;

/// The size of a batch in events and in bytes. The server accepts 1,000 events and 16 MiB.
const BATCH: usize = 500;
const BATCH_BYTES: usize = 8 << 20;
/// How many batches are sent at the same time.
const PIPELINE: usize = 4;
/// The progress bar appears after this time.
const PROGRESS_DELAY: Duration = Duration::from_millis(500);

#[derive(clap::Args)]
#[command(
    override_usage = "posthaste publish --type TYPE --source SERVICE --payload JSON [OPTIONS]\n       posthaste publish FILE"
)]
pub struct PublishOptions {
    /// File with one event, a JSON array of events, or one event on each line; - is stdin
    ///
    /// Four batches are sent at the same time, so distant lines may be stored in a different order.
    #[arg(conflicts_with = "event", required_unless_present = "event")]
    file: Option<PathBuf>,
    #[command(flatten)]
    event: EventFlags,
}

/// One event.
#[derive(clap::Args)]
#[group(id = "event", multiple = true)]
struct EventFlags {
    /// Type of the event, such as order.placed
    #[arg(long = "type", value_name = "TYPE", visible_alias = "event-type", requires_all = ["source_service", "payload"])]
    event_type: Option<String>,
    /// Service that publishes the event
    #[arg(long = "source", value_name = "SERVICE", visible_alias = "source-service", requires = "event_type")]
    source_service: Option<String>,
    /// Any JSON value; subscribers receive exactly these bytes
    #[arg(long, value_name = "JSON", requires = "event_type", value_parser = raw_json)]
    payload: Option<Box<RawValue>>,
    /// Id of the event; publishing the same event again stores nothing [default: a new id]
    #[arg(long, requires = "event_type")]
    id: Option<String>,
    /// Type of the aggregate that the event belongs to
    #[arg(long, value_name = "TYPE", requires = "event_type")]
    aggregate_type: Option<String>,
    /// Aggregate that the event belongs to
    #[arg(long, value_name = "ID", requires = "event_type")]
    aggregate_id: Option<String>,
    /// Header to pass on to subscribers; can be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = name_and_value, requires = "event_type")]
    headers: Vec<(String, String)>,
    /// Type of the resource that the event is about
    #[arg(long, value_name = "TYPE", requires = "event_type")]
    resource_type: Option<String>,
    /// Operation on the resource
    #[arg(long, value_name = "TYPE", requires = "event_type")]
    operation_type: Option<String>,
    /// Tenant that the event belongs to
    #[arg(long, value_name = "ID", visible_alias = "tenant-id", requires = "event_type")]
    tenant: Option<String>,
    /// How long to delay the delivery, such as 10m
    #[arg(long, value_name = "DURATION", requires = "event_type")]
    deliver_after: Option<String>,
}

/// The results of publishing a file.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Summary {
    accepted: u64,
    /// How many of the accepted events the server had stored before.
    known: u64,
    refused: Vec<Refusal>,
}

#[derive(Debug, PartialEq, Serialize)]
struct Refusal {
    line: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    detail: String,
}

/// Events that one request contains.
#[derive(Default)]
struct Batch {
    /// A JSON array without its closing bracket.
    body: Vec<u8>,
    /// The line of each event in the body.
    lines: Vec<u64>,
    /// Lines between these events that are not valid events.
    bad: Vec<Refusal>,
    /// How many bytes of the input were read up to the end of this batch.
    read: u64,
}

pub async fn run(options: PublishOptions, client: &Client, output: Output) -> anyhow::Result<()> {
    let Some(path) = options.file else {
        let event = options.event.event();
        if let Err(errors) = event.clone().validate() {
            let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
            return Err(UsageError(messages.join("; ")).into());
        }
        let published = client.publish(&event).await?;
        return match output {
            // Only the id, for scripts.
            Output::Table => print(format_args!("{}\n", published.event_id)),
            Output::Json => output.print(&published, |_| Table::new([])),
        };
    };
    let summary = publish_file(path, client).await?;
    for Refusal { line, detail, .. } in &summary.refused {
        say(format_args!("line {line}: {detail}"));
    }
    output.print(&summary, |summary| {
        let mut table = Table::new(["ACCEPTED", "KNOWN BEFORE", "REFUSED"]);
        table.row([summary.accepted.to_string(), summary.known.to_string(), summary.refused.len().to_string()]);
        table
    })?;
    match summary.refused.len() {
        0 => Ok(()),
        refused => anyhow::bail!("{refused} of {} events were refused", summary.accepted + refused as u64),
    }
}

impl EventFlags {
    fn event(self) -> EventIn {
        EventIn {
            event_id: self.id,
            event_type: self.event_type.unwrap_or_default(),
            source_service: self.source_service.unwrap_or_default(),
            resource_type: self.resource_type,
            operation_type: self.operation_type,
            tenant_id: self.tenant,
            aggregate_type: self.aggregate_type,
            aggregate_id: self.aggregate_id,
            headers: (!self.headers.is_empty()).then_some(Headers(self.headers)),
            deliver_after: self.deliver_after,
            payload: self.payload,
            ..EventIn::default()
        }
    }
}

fn raw_json(text: &str) -> Result<Box<RawValue>, String> {
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}; strings need double quotes"))
}

async fn publish_file(path: PathBuf, client: &Client) -> anyhow::Result<Summary> {
    let unreadable = format!("{} cannot be read", path.display());
    let (size, reader) = open(&path).with_context(|| unreadable.clone())?;
    let (batches, mut waiting) = mpsc::channel(PIPELINE);
    let reading = tokio::task::spawn_blocking(move || read_batches(reader, &batches));

    let waiting = stream::poll_fn(move |context| waiting.poll_recv(context));
    let sending = waiting.map(|batch: Batch| async move {
        let Batch { mut body, lines, bad, read } = batch;
        body.push(b']');
        let response = match lines.is_empty() {
            true => Ok(BatchOut { results: Vec::new() }),
            false => client.publish_batch(Bytes::from(body)).await,
        };
        (lines, bad, read, response)
    });
    // Responses in the order of the input, so that refused lines are reported in order.
    let mut responses = std::pin::pin!(sending.buffered(PIPELINE));
    let progress = Progress::new(size);
    let mut summary = Summary::default();
    while let Some((lines, bad, read, response)) = responses.next().await {
        let response = response.with_context(|| interrupted(&summary, &lines))?;
        summary.refused.extend(bad);
        summary.add(&lines, response);
        progress.show(read, summary.accepted);
    }
    progress.finish();
    reading.await?.context(unreadable)?;
    summary.refused.sort_by_key(|refusal| refusal.line);
    Ok(summary)
}

fn interrupted(summary: &Summary, lines: &[u64]) -> String {
    let first = lines.first().copied().unwrap_or_default();
    format!("{} events are accepted; the results of line {first} and the lines after it are unknown", summary.accepted)
}

impl Summary {
    fn add(&mut self, lines: &[u64], response: BatchOut) {
        let mut results = response.results.into_iter();
        for &line in lines {
            let refusal = match results.next() {
                Some(BatchItem::Stored { status, .. }) => {
                    self.accepted += 1;
                    self.known += u64::from(status == 200);
                    continue;
                }
                Some(BatchItem::Refused { code, detail, .. }) => Refusal { line, code: Some(code), detail },
                None => Refusal { line, code: None, detail: "the server returned no result for this event".to_owned() },
            };
            self.refused.push(refusal);
        }
    }
}

type Input = Box<dyn io::BufRead + Send>;

/// Opens the input; returns its size if it is a regular file.
fn open(path: &Path) -> io::Result<(Option<u64>, Input)> {
    if path == Path::new("-") {
        return Ok((None, Box::new(BufReader::new(io::stdin()))));
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let size = metadata.is_file().then_some(metadata.len());
    Ok((size, Box::new(BufReader::with_capacity(1 << 16, file))))
}

/// Reads the input and sends it as batches. Ends early if the receiver is closed.
fn read_batches(mut reader: Input, batches: &mpsc::Sender<Batch>) -> io::Result<()> {
    let mut batch = Batch::default();
    input::read(&mut reader, &mut |entry| {
        if batch.add(entry) { batches.blocking_send(std::mem::take(&mut batch)).is_ok() } else { true }
    })?;
    if !batch.lines.is_empty() || !batch.bad.is_empty() {
        // The receiver is closed only after an error, which it reports itself.
        let _ = batches.blocking_send(batch);
    }
    Ok(())
}

impl Batch {
    /// Adds an entry; returns true if the batch is full.
    fn add(&mut self, entry: Entry) -> bool {
        let Entry { line, end, event } = entry;
        self.read = end;
        match event {
            Ok(event) => {
                self.body.push(if self.lines.is_empty() { b'[' } else { b',' });
                self.body.extend_from_slice(event.as_bytes());
                self.lines.push(line);
            }
            Err(detail) => self.bad.push(Refusal { line, code: None, detail }),
        }
        self.lines.len() + self.bad.len() >= BATCH || self.body.len() >= BATCH_BYTES
    }
}

/// A progress bar on stderr, if that is a terminal. It appears only if publishing takes longer than [`PROGRESS_DELAY`].
struct Progress(ProgressBar);

impl Progress {
    fn new(size: Option<u64>) -> Self {
        let bar = match size {
            Some(size) => {
                ProgressBar::new(size).with_style(style("{bar:30.cyan/dim} {percent:>3}%  {msg}  {eta} left"))
            }
            None => ProgressBar::new_spinner().with_style(style("{spinner:.cyan} {msg}")),
        };
        bar.set_draw_target(ProgressDrawTarget::hidden());
        Self(bar)
    }

    fn show(&self, read: u64, accepted: u64) {
        if self.0.is_hidden() && self.0.elapsed() > PROGRESS_DELAY && io::stderr().is_terminal() {
            self.0.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.0.set_position(read);
        self.0.set_message(format!("{accepted} events"));
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    // An invalid template is a bug in this file; the default bar is better than none.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_keeps_the_bytes_of_its_events() {
        let mut batch = Batch::default();
        for (line, event) in [(1, Ok("{ \"a\":1 }".to_owned())), (2, Err("no".to_owned())), (3, Ok("{}".to_owned()))] {
            assert!(!batch.add(Entry { line, end: line * 10, event }));
        }
        assert_eq!(batch.body, b"[{ \"a\":1 },{}");
        assert_eq!((batch.lines, batch.bad[0].line, batch.read), (vec![1, 3], 2, 30));
    }

    #[test]
    fn a_batch_is_full_by_number_of_events_or_by_size() {
        let entry = |text: String| Entry { line: 1, end: 1, event: Ok(text) };
        let mut batch = Batch::default();
        assert!((1..BATCH).all(|_| !batch.add(entry("{}".to_owned()))));
        assert!(batch.add(entry("{}".to_owned())));
        assert!(Batch::default().add(entry(" ".repeat(BATCH_BYTES))));
    }

    #[test]
    fn results_are_matched_to_their_lines() {
        let mut summary = Summary::default();
        let stored = |status| BatchItem::Stored { event_id: "e".to_owned(), status };
        let refused = BatchItem::Refused { status: 409, code: "c".to_owned(), detail: "d".to_owned() };
        summary.add(&[4, 7, 9, 12], BatchOut { results: vec![stored(202), refused, stored(200)] });
        assert_eq!((summary.accepted, summary.known), (2, 1));
        let refusal = Refusal { line: 7, code: Some("c".to_owned()), detail: "d".to_owned() };
        assert_eq!(summary.refused[0], refusal);
        // A missing result counts as refused.
        assert_eq!((summary.refused[1].line, summary.refused.len()), (12, 2));
    }
}

use std::path::PathBuf;

use anyhow::Context;
use clap::Subcommand;
use posthaste_api::{
    QuarantineActionIn, QuarantineDiscardIn, QuarantineFilterIn, QuarantinePage, QuarantineReplayIn, QuarantineResults,
    QuarantineStatus, QuarantinedDetail,
};
use uuid::Uuid;

use crate::client::{Client, ClientError};
use crate::exit::{NotFound, UsageError};
use crate::output::{Output, Table, moment, print, say, shortened};

/// How many characters of a reason a list shows; `show` prints all of it.
const REASON_WIDTH: usize = 60;
/// How many bytes of a value `show` prints; `--raw` writes all of them.
const SHOWN_BYTES: usize = 256;
const BYTES_PER_LINE: usize = 16;

#[derive(Subcommand)]
pub enum QuarantineCommand {
    /// List quarantined records, newest first; by default those with the status QUARANTINED
    List(Box<Filter>),
    /// Show one record: where it was, why it could not be read, and its first bytes
    Show {
        /// Id of the record
        #[arg(value_parser = id)]
        id: Uuid,
        /// Write the value of the record to this file
        #[arg(long, value_name = "FILE")]
        raw: Option<PathBuf>,
    },
    /// Publish records to their topics again, for example after an update that can read them
    Replay {
        #[command(flatten)]
        selection: Selection,
        /// Reason for the replay, for the log of the server
        #[arg(long)]
        reason: Option<String>,
    },
    /// Mark records as not needed
    Discard {
        #[command(flatten)]
        selection: Selection,
        /// Why they are not needed, kept with the records
        #[arg(long)]
        reason: String,
    },
}

/// The filters of the REST API, by the same names.
#[derive(clap::Args)]
pub struct Filter {
    /// Only records that this group could not read
    #[arg(long)]
    group: Option<String>,
    /// Only records of this topic
    #[arg(long)]
    topic: Option<String>,
    /// quarantined, replayed, discarded or all [default: quarantined]
    #[arg(long)]
    status: Option<String>,
    /// Quarantined at or after this time (RFC 3339)
    #[arg(long)]
    from: Option<String>,
    /// Quarantined at or before this time (RFC 3339)
    #[arg(long)]
    to: Option<String>,
    /// Records per page, at most 500
    #[arg(long)]
    size: Option<u32>,
    /// Cursor that the previous page printed
    #[arg(long)]
    cursor: Option<String>,
}

/// Ids, or the filters of the list.
#[derive(clap::Args)]
pub struct Selection {
    /// Ids of records
    #[arg(value_parser = id, conflicts_with_all = ["group", "topic", "from", "to", "all"])]
    ids: Vec<Uuid>,
    /// All records that this group could not read
    #[arg(long)]
    group: Option<String>,
    /// All records of this topic
    #[arg(long)]
    topic: Option<String>,
    /// All records that were quarantined at or after this time (RFC 3339)
    #[arg(long)]
    from: Option<String>,
    /// All records that were quarantined at or before this time (RFC 3339)
    #[arg(long)]
    to: Option<String>,
    /// All records in quarantine
    #[arg(long, conflicts_with_all = ["group", "topic", "from", "to"])]
    all: bool,
}

fn id(text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| "not an id: ids are UUIDs, as `posthaste quarantine list` shows them".to_owned())
}

pub async fn run(command: QuarantineCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        QuarantineCommand::List(filter) => {
            let names_a_status = filter.status.is_some();
            let page = client.quarantine(&filter.query()).await?;
            output.print(&page, list)?;
            let (shown, total) = (page.items.len(), page.total);
            let at_least = if page.total_is_lower_bound { "at least " } else { "" };
            if let Some(cursor) = &page.next_cursor {
                say(format_args!("{shown} of {at_least}{total}; the next page: --cursor {cursor}"));
            }
            if total == 0 && !names_a_status {
                say("nothing is in quarantine; --status all also lists replayed and discarded records");
            }
            Ok(())
        }
        QuarantineCommand::Show { id, raw } => {
            let detail = client.quarantined(id).await?;
            if let Some(file) = raw {
                let written = std::fs::write(&file, &detail.value_base64.0);
                written.with_context(|| format!("{} cannot be written", file.display()))?;
                say(format_args!("wrote {} bytes to {}", detail.record.size, file.display()));
            }
            match output {
                Output::Json => output.print(&detail, |_| Table::new([])),
                Output::Table => show(&detail),
            }
        }
        QuarantineCommand::Replay { selection, reason } => {
            let replay = async |action| client.replay_quarantined(&QuarantineReplayIn(action)).await;
            run_action(selection.action(reason)?, replay, QuarantineStatus::Replayed, output).await
        }
        QuarantineCommand::Discard { selection, reason } => {
            let discard = async |action| client.discard_quarantined(&QuarantineDiscardIn(action)).await;
            run_action(selection.action(Some(reason))?, discard, QuarantineStatus::Discarded, output).await
        }
    }
}

/// Calls the server until it has dealt with all records that meet the filter. Fails unless all have the wanted status.
///
/// A replayed record that is unreadable again is a new record in quarantine. It is newer than those that the call
/// selects, so it is not replayed in an endless loop.
async fn run_action(
    mut action: QuarantineActionIn,
    call: impl AsyncFn(QuarantineActionIn) -> Result<QuarantineResults, ClientError>,
    wanted: QuarantineStatus,
    output: Output,
) -> anyhow::Result<()> {
    let mut all = QuarantineResults::default();
    loop {
        let part = call(action.clone()).await?;
        all.results.extend(part.results);
        match part.next_cursor {
            Some(cursor) => action.cursor = Some(cursor),
            None => break,
        }
    }
    output.print(&all, results)?;
    if all.results.is_empty() {
        say("no record in quarantine meets the conditions");
    }
    let unknown: Vec<String> =
        all.results.iter().filter(|result| result.status.is_none()).map(|result| result.id.to_string()).collect();
    if !unknown.is_empty() {
        return Err(NotFound(format!("there is no quarantined record with the id {}", unknown.join(", "))).into());
    }
    let failed = all.results.iter().filter(|result| result.detail.is_some()).count();
    if failed > 0 {
        anyhow::bail!("{failed} of {} records are not {}", all.results.len(), wanted.as_str());
    }
    Ok(())
}

impl Filter {
    fn query(self) -> [(&'static str, Option<String>); 7] {
        [
            ("group", self.group),
            ("topic", self.topic),
            ("status", self.status),
            ("from", self.from),
            ("to", self.to),
            ("size", self.size.map(|size| size.to_string())),
            ("cursor", self.cursor),
        ]
    }
}

impl Selection {
    fn action(self, reason: Option<String>) -> Result<QuarantineActionIn, UsageError> {
        let Self { ids, group, topic, from, to, all } = self;
        let filter = QuarantineFilterIn { group, topic, from, to };
        let filter = (filter != QuarantineFilterIn::default()).then_some(filter);
        let ids = (!ids.is_empty()).then_some(ids);
        if ids.is_none() && filter.is_none() && !all {
            let message = "name the records: ids, or --group, --topic, --from, --to, or --all";
            return Err(UsageError(message.to_owned()));
        }
        Ok(QuarantineActionIn { ids, filter, all, cursor: None, reason })
    }
}

fn list(page: &QuarantinePage) -> Table {
    let mut table = Table::new(["ID", "GROUP", "TOPIC", "PARTITION", "OFFSET", "SIZE", "STATUS", "CREATED", "REASON"]);
    for record in &page.items {
        table.row([
            record.id.to_string(),
            record.group.clone(),
            record.topic.clone(),
            record.partition.to_string(),
            record.offset.to_string(),
            record.size.to_string(),
            record.status.as_str().to_owned(),
            moment(record.created_at),
            shortened(&record.reason, REASON_WIDTH),
        ]);
    }
    table
}

fn show(detail: &QuarantinedDetail) -> anyhow::Result<()> {
    let QuarantinedDetail { record, headers, value_base64 } = detail;
    let headers: Vec<String> = headers.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let fields = Table::of_fields([
        ("id", record.id.to_string()),
        ("status", record.status.as_str().to_owned()),
        ("status reason", record.status_reason.clone().unwrap_or_default()),
        ("reason", record.reason.clone()),
        ("replayable", if record.replayable { "yes" } else { "no: the bus could not read it" }.to_owned()),
        ("group", record.group.clone()),
        ("topic", record.topic.clone()),
        ("partition", record.partition.to_string()),
        ("offset", record.offset.to_string()),
        ("key", record.key.clone()),
        ("headers", headers.join(", ")),
        ("size", record.size.to_string()),
        ("created", moment(record.created_at)),
        ("updated", moment(record.updated_at)),
    ]);
    print(format_args!("{fields}\n{}", hex_dump(&value_base64.0)))
}

/// The first bytes, as numbers and as text.
fn hex_dump(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (index, line) in bytes[..bytes.len().min(SHOWN_BYTES)].chunks(BYTES_PER_LINE).enumerate() {
        let numbers: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let shown = |byte: &u8| if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' };
        let characters: String = line.iter().map(shown).collect();
        let width = 3 * BYTES_PER_LINE;
        text += &format!("{:08x}  {:<width$} {characters}\n", index * BYTES_PER_LINE, numbers.join(" "));
    }
    match bytes.len().checked_sub(SHOWN_BYTES) {
        Some(left @ 1..) => text + &format!("… and {left} more bytes: --raw FILE writes all of them\n"),
        _ => text,
    }
}

fn results(results: &QuarantineResults) -> Table {
    let mut table = Table::new(["ID", "STATUS", "DETAIL"]);
    for result in &results.results {
        let status = result.status.map_or("unknown", QuarantineStatus::as_str);
        table.row([result.id.to_string(), status.to_owned(), result.detail.clone().unwrap_or_default()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_shows_numbers_and_text_and_has_a_limit() {
        assert_eq!(hex_dump(b""), "");
        assert_eq!(hex_dump(b"A\x00z"), format!("00000000  {:<48} A.z\n", "41 00 7a"));
        let long = hex_dump(&[b'x'; 300]);
        assert!(long.contains("000000f0") && !long.contains("00000100"), "{long}");
        assert!(long.ends_with("… and 44 more bytes: --raw FILE writes all of them\n"), "{long}");
    }
}

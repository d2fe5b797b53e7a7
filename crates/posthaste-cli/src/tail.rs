use std::time::Duration;

use posthaste_api::TopicRecord;

use crate::client::Client;
use crate::output::print;

/// How long to wait before the next request when there was nothing to read.
const POLL: Duration = Duration::from_millis(500);
/// The largest page of the API.
const PAGE: u64 = 500;

#[derive(clap::Args)]
pub struct TailOptions {
    /// Topic to read
    topic: String,
    /// Where to begin
    #[arg(long, value_enum, default_value_t = Start::Earliest)]
    from: Start,
    /// End after this many records
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Wait for more records instead of ending after the last one
    #[arg(long)]
    follow: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
pub enum Start {
    /// At the earliest record
    Earliest,
    /// At the next record: use it with --follow
    Latest,
}

/// Prints each record as one line of JSON.
pub async fn run(options: TailOptions, client: &Client) -> anyhow::Result<()> {
    let mut from = match options.from {
        Start::Earliest => "earliest".to_owned(),
        Start::Latest => "latest".to_owned(),
    };
    let mut left = options.limit.unwrap_or(u64::MAX);
    loop {
        let page = client.topic_records(&options.topic, &from, left.min(PAGE)).await?;
        for record in &page.items {
            print(format_args!("{}\n", line(record)?))?;
        }
        left = left.saturating_sub(page.items.len() as u64);
        match (left, page.items.is_empty()) {
            (0, _) => return Ok(()),
            (_, true) if !options.follow => return Ok(()),
            (_, true) => tokio::time::sleep(POLL).await,
            (_, false) => {}
        }
        from = page.cursor;
    }
}

/// The record as JSON without line breaks. A payload has its own bytes, and in JSON a line break is only white space.
fn line(record: &TopicRecord) -> Result<String, serde_json::Error> {
    Ok(serde_json::to_string(record)?.replace(['\n', '\r'], " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line() {
        let json = "{\"topic\":\"t\",\"partition\":0,\"offset\":1,\"key\":\"a\\nb\",\"schemaId\":null,\"value\":{\r\n \"a\": 1.0\n}}";
        let record: TopicRecord = serde_json::from_str(json).unwrap();
        assert_eq!(line(&record).unwrap(), json.replace(['\r', '\n'], " "));
    }
}

use std::time::Duration;

use clap::Subcommand;
use posthaste_api::{
    DeadLetter, DeadLetterDetail, DeadLetterPage, DeadLetterStatus, ReplayIn, ReplayOut, RetryAttempt, Trigger,
};
use uuid::Uuid;

use crate::client::Client;
use crate::exit::{Exit, NotFound, UsageError};
use crate::output::{Output, Table, moment, print, say, shortened};

/// How many characters of an error a list shows; `show` prints all of it.
const ERROR_WIDTH: usize = 60;

#[derive(Subcommand)]
pub enum DltCommand {
    /// List dead letters; by default those with the status FAILED
    List(Box<Filter>),
    /// Show one dead letter with its event and its history
    Show {
        /// Id of the dead letter, or of its event
        id: String,
    },
    /// Send dead letters again
    Replay {
        /// Ids of dead letters or of events; an event stands for all its dead letters that are not delivered yet
        #[arg(required = true)]
        ids: Vec<String>,
        /// Reason for the replay, stored with it
        #[arg(long)]
        reason: Option<String>,
        /// Seconds to wait for the results, at most 60; fail unless all dead letters are delivered
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=60))]
        wait: Option<u64>,
    },
}

/// The filters of the REST API, by the same names.
#[derive(clap::Args)]
pub struct Filter {
    /// Only dead letters of the event with this id
    #[arg(long, alias = "messageId")]
    message_id: Option<String>,
    /// Only dead letters of this subscriber
    #[arg(long, alias = "subscriberId")]
    subscriber_id: Option<String>,
    /// Part of the error text
    #[arg(long)]
    error: Option<String>,
    /// Created at or after this time (RFC 3339)
    #[arg(long)]
    from: Option<String>,
    /// Created at or before this time (RFC 3339)
    #[arg(long)]
    to: Option<String>,
    /// new, processed, failed or all [default: failed]
    #[arg(long)]
    status: Option<String>,
    /// user-lifecycle, access-session, policy-client or organization
    #[arg(long)]
    domain: Option<String>,
    /// Type of the event
    #[arg(long, alias = "eventType")]
    event_type: Option<String>,
    /// Start of an event id or subscriber, or part of an error text
    #[arg(long)]
    q: Option<String>,
    /// createdAt, updatedAt or retryCount, ascending; with - in front, descending
    #[arg(long, allow_hyphen_values = true)]
    sort: Option<String>,
    /// Number of the page, from 0
    #[arg(long)]
    page: Option<u32>,
    /// Dead letters per page, at most 500
    #[arg(long)]
    size: Option<u32>,
    /// Cursor that the previous page printed, instead of --page
    #[arg(long, allow_hyphen_values = true, conflicts_with = "page")]
    cursor: Option<String>,
}

pub async fn run(command: DltCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        DltCommand::List(filter) => {
            let names_a_status = filter.status.is_some();
            let page = client.dead_letters(&filter.query()).await?;
            output.print(&page, list)?;
            let (shown, total) = (page.items.len() as u64, page.total);
            let at_least = if page.total_is_lower_bound { "at least " } else { "" };
            if let Some(cursor) = &page.next_cursor {
                say(format_args!("{shown} of {at_least}{total}; the next page: --cursor {cursor}"));
            } else if shown < total {
                say(format_args!("{shown} of {at_least}{total}, the last page"));
            }
            if total == 0 && !names_a_status {
                say("no dead letter is FAILED; --status all also lists new and delivered ones");
            }
            Ok(())
        }
        DltCommand::Show { id } => {
            let dead_letter = client.dead_letter(exactly_one(&id, dead_letters_for(client, &id).await?)?).await?;
            match output {
                Output::Json => output.print(&dead_letter, |_| Table::new([])),
                Output::Table => show(&dead_letter),
            }
        }
        DltCommand::Replay { ids, reason, wait } => {
            let mut dead_letters = Vec::new();
            for id in &ids {
                dead_letters.extend(replayable(dead_letters_for(client, id).await?));
            }
            if dead_letters.is_empty() {
                anyhow::bail!("nothing to replay: every dead letter of {} is delivered", ids.join(", "));
            }
            let replay = ReplayIn { ids: dead_letters, reason };
            let replay = replay
                .validate()
                .map_err(|errors| UsageError(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")))?;
            let response = client.replay(&replay, wait.map(Duration::from_secs)).await?;
            output.print(&response, replayed)?;
            check_replay(&response, replay.ids.len())
        }
    }
}

/// The dead letters that an id on the command line stands for.
enum Named {
    DeadLetter(Uuid),
    DeadLettersOfEvent(Vec<DeadLetter>),
}

/// Finds the dead letter with this id, else the dead letters of the event with this id: an event id may be a UUID, too.
async fn dead_letters_for(client: &Client, id: &str) -> anyhow::Result<Named> {
    if let Ok(uuid) = Uuid::parse_str(id) {
        match client.dead_letter(uuid).await {
            Ok(_) => return Ok(Named::DeadLetter(uuid)),
            Err(error) if error.exit() == Exit::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    } else if !posthaste_api::is_event_id(id) {
        let message = format!(
            "{id:?} is neither the id of a dead letter, which is a UUID, nor that of an event, which has 1 to 128 \
             characters of A-Z a-z 0-9 . _ : -; `posthaste dlt list` shows both"
        );
        return Err(UsageError(message).into());
    }
    let query =
        [("messageId", Some(id.to_owned())), ("status", Some("ALL".to_owned())), ("size", Some("500".to_owned()))];
    let page = client.dead_letters(&query).await?;
    match page.items.is_empty() {
        true => {
            Err(NotFound(format!("there is no dead letter with the id {id}, and none of an event with this id")).into())
        }
        false => Ok(Named::DeadLettersOfEvent(page.items)),
    }
}

/// Returns the id of the dead letter to show. Fails if the event has more than one.
fn exactly_one(id: &str, named: Named) -> anyhow::Result<Uuid> {
    match named {
        Named::DeadLetter(id) => Ok(id),
        Named::DeadLettersOfEvent(dead_letters) => match dead_letters.as_slice() {
            [dead_letter] => Ok(dead_letter.id),
            dead_letters => {
                let one = |dead_letter: &DeadLetter| format!("{} (of {})", dead_letter.id, dead_letter.subscriber_id);
                let ids: Vec<String> = dead_letters.iter().map(one).collect();
                Err(UsageError(format!("event {id} has {} dead letters: name one, {}", ids.len(), ids.join(" or ")))
                    .into())
            }
        },
    }
}

/// The dead letters to replay. Leaves out the delivered ones of an event. A dead letter that the user named by its id
/// stays in, so that the replay fails if it is delivered already.
fn replayable(named: Named) -> Vec<Uuid> {
    match named {
        Named::DeadLetter(id) => vec![id],
        Named::DeadLettersOfEvent(dead_letters) => {
            let open = dead_letters.iter().filter(|dead_letter| dead_letter.status != DeadLetterStatus::Processed);
            open.map(|dead_letter| dead_letter.id).collect()
        }
    }
}

/// Fails if the server replayed fewer dead letters than requested, or if not all of them were delivered.
fn check_replay(response: &ReplayOut, requested: usize) -> anyhow::Result<()> {
    if (response.matched as usize) < requested {
        anyhow::bail!(
            "only {} of {requested} dead letters can be replayed: the others do not exist or are delivered already",
            response.matched
        );
    }
    let results = response.results.as_deref().unwrap_or_default();
    let delivered = results.iter().filter(|result| result.status == DeadLetterStatus::Processed).count();
    if response.results.is_some() && (delivered as u64) < response.matched {
        anyhow::bail!(
            "{delivered} of {} dead letters were delivered; the others failed again or are still in flight",
            response.matched
        );
    }
    Ok(())
}

impl Filter {
    fn query(self) -> [(&'static str, Option<String>); 13] {
        [
            ("messageId", self.message_id),
            ("subscriberId", self.subscriber_id),
            ("error", self.error),
            ("from", self.from),
            ("to", self.to),
            ("status", self.status),
            ("domain", self.domain),
            ("eventType", self.event_type),
            ("q", self.q),
            ("sort", self.sort),
            ("page", self.page.map(|page| page.to_string())),
            ("size", self.size.map(|size| size.to_string())),
            ("cursor", self.cursor),
        ]
    }
}

fn list(page: &DeadLetterPage) -> Table {
    let mut table = Table::new(["ID", "EVENT", "TYPE", "SUBSCRIBER", "STATUS", "RETRIES", "UPDATED", "ERROR"]);
    for dead_letter in &page.items {
        let error = dead_letter.error.as_deref().unwrap_or_default();
        table.row([
            dead_letter.id.to_string(),
            dead_letter.message_id.clone(),
            dead_letter.event_type.clone(),
            dead_letter.subscriber_id.clone(),
            dead_letter.status.as_str().to_owned(),
            dead_letter.retry_count.to_string(),
            moment(dead_letter.updated_at),
            shortened(error, ERROR_WIDTH),
        ]);
    }
    table
}

fn show(detail: &DeadLetterDetail) -> anyhow::Result<()> {
    let DeadLetterDetail { letter, event, failure, history } = detail;
    let immediate = failure
        .as_ref()
        .map(|failure| format!("{} failed, the last with {}: {}", failure.attempts, failure.code, failure.message));
    let fields = Table::of_fields([
        ("id", letter.id.to_string()),
        ("event", letter.message_id.clone()),
        ("type", letter.event_type.clone()),
        ("domain", letter.domain.to_string()),
        ("subscriber", letter.subscriber_id.clone()),
        ("subscription", letter.subscription_id.to_string()),
        ("endpoint", letter.endpoint.clone()),
        ("status", letter.status.as_str().to_owned()),
        ("retries", letter.retry_count.to_string()),
        ("error code", letter.error_code.clone().unwrap_or_default()),
        ("error", letter.error.clone().unwrap_or_default()),
        ("first attempts", immediate.unwrap_or_default()),
        ("created", moment(letter.created_at)),
        ("updated", moment(letter.updated_at)),
    ]);
    // Parse and print the JSON again, so that it contains no control characters for the terminal.
    let readable: serde_json::Value = serde_json::from_str(event.get())?;
    print(format_args!("{fields}\n{}\n{readable:#}\n", history_table(history)))
}

fn history_table(history: &[RetryAttempt]) -> Table {
    let mut table = Table::new(["ATTEMPT", "TRIGGER", "RESULT", "TOOK", "MESSAGE"]);
    for attempt in history {
        table.row([
            moment(attempt.process_date),
            match attempt.trigger {
                Trigger::Scheduled => "scheduled".to_owned(),
                Trigger::Replay => "replay".to_owned(),
            },
            attempt.error_code.clone().unwrap_or_else(|| "delivered".to_owned()),
            format!("{} ms", attempt.duration_ms),
            attempt.error_message.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn replayed(response: &ReplayOut) -> Table {
    let Some(results) = &response.results else {
        let id = response.replay_id.map(|id| id.to_string()).unwrap_or_default();
        return Table::of_fields([("replay", id), ("matched", response.matched.to_string())]);
    };
    let mut table = Table::new(["ID", "STATUS", "ERROR"]);
    for result in results {
        let error = result.error_code.clone().unwrap_or_default();
        table.row([result.id.to_string(), result.status.as_str().to_owned(), error]);
    }
    table
}

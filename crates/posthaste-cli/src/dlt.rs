use std::time::Duration;

use clap::Subcommand;
use posthaste_api::{
    DeadLetter, DeadLetterDetail, DeadLetterPage, DeadLetterStatus, ReplayIn, ReplayOut, RetryAttempt, Trigger,
};
use uuid::Uuid;

use crate::client::Client;
use crate::exit::{Exit, NotFound, UsageError};
use crate::output::{Output, Table, moment, print, say, shortened};

/// How much of an error a list shows; `show` has all of it.
const ERROR_WIDTH: usize = 60;

#[derive(Subcommand)]
pub enum DltCommand {
    /// List dead letters; by default those that failed
    List(Box<Filter>),
    /// Show one dead letter with its event and its history
    Show {
        /// Id of the dead letter, or of its event
        id: String,
    },
    /// Send dead letters again
    Replay {
        /// Ids of dead letters, or of events: then all letters of the event that are not delivered yet
        #[arg(required = true)]
        ids: Vec<String>,
        /// Why, for those who read the history
        #[arg(long)]
        reason: Option<String>,
        /// Wait so many seconds, at most 60, for the results, and fail unless all were delivered
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=60))]
        wait: Option<u64>,
    },
}

/// The filters of the REST API, by the same names.
#[derive(clap::Args)]
pub struct Filter {
    /// Id of the event
    #[arg(long, alias = "messageId")]
    message_id: Option<String>,
    /// Whose letters
    #[arg(long, alias = "subscriberId")]
    subscriber_id: Option<String>,
    /// Part of the error text
    #[arg(long)]
    error: Option<String>,
    /// Not before this time (RFC 3339)
    #[arg(long)]
    from: Option<String>,
    /// Before this time (RFC 3339)
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
    /// createdAt, updatedAt or retryCount; with - in front, the other way round
    #[arg(long, allow_hyphen_values = true)]
    sort: Option<String>,
    /// Page, from 0
    #[arg(long)]
    page: Option<u32>,
    /// Letters to a page, at most 500
    #[arg(long)]
    size: Option<u32>,
    /// Where the page before ended, instead of --page
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
                say("none is FAILED; --status all shows the new and the delivered ones, too");
            }
            Ok(())
        }
        DltCommand::Show { id } => {
            let letter = client.dead_letter(only(&id, letters_of(client, &id).await?)?).await?;
            match output {
                Output::Json => output.print(&letter, |_| Table::new([])),
                Output::Table => show(&letter),
            }
        }
        DltCommand::Replay { ids, reason, wait } => {
            let mut letters = Vec::new();
            for id in &ids {
                letters.extend(replayable(letters_of(client, id).await?));
            }
            if letters.is_empty() {
                anyhow::bail!("nothing to replay: every dead letter of {} is delivered", ids.join(", "));
            }
            let replay = ReplayIn { ids: letters, reason };
            let replay = replay
                .validate()
                .map_err(|errors| UsageError(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")))?;
            let answer = client.replay(&replay, wait.map(Duration::from_secs)).await?;
            output.print(&answer, replayed)?;
            check_replay(&answer, replay.ids.len())
        }
    }
}

/// What an id on the command line names.
enum Named {
    Letter(Uuid),
    LettersOfEvent(Vec<DeadLetter>),
}

/// Finds the dead letter with this id, or those of the event with this id: an event's id may be a UUID, too.
async fn letters_of(client: &Client, id: &str) -> anyhow::Result<Named> {
    if let Ok(letter) = Uuid::parse_str(id) {
        match client.dead_letter(letter).await {
            Ok(_) => return Ok(Named::Letter(letter)),
            Err(error) if error.exit() == Exit::NotFound => {}
            Err(error) => return Err(error.into()),
        }
    } else if !posthaste_api::is_event_id(id) {
        let told = format!(
            "{id:?} is neither the id of a dead letter, which is a UUID, nor that of an event, which has 1 to 128 \
             characters of A-Z a-z 0-9 . _ : -; `posthaste dlt list` shows both"
        );
        return Err(UsageError(told).into());
    }
    let query =
        [("messageId", Some(id.to_owned())), ("status", Some("ALL".to_owned())), ("size", Some("500".to_owned()))];
    let page = client.dead_letters(&query).await?;
    match page.items.is_empty() {
        true => {
            Err(NotFound(format!("there is no dead letter with the id {id}, and none of an event with this id")).into())
        }
        false => Ok(Named::LettersOfEvent(page.items)),
    }
}

/// The one letter to show.
fn only(id: &str, named: Named) -> anyhow::Result<Uuid> {
    match named {
        Named::Letter(id) => Ok(id),
        Named::LettersOfEvent(letters) => match letters.as_slice() {
            [letter] => Ok(letter.id),
            letters => {
                let one = |letter: &DeadLetter| format!("{} (of {})", letter.id, letter.subscriber_id);
                let ids: Vec<String> = letters.iter().map(one).collect();
                Err(UsageError(format!("event {id} has {} dead letters: name one, {}", ids.len(), ids.join(" or ")))
                    .into())
            }
        },
    }
}

/// A letter that was named is replayed or complained about; of an event's letters, the delivered ones need nothing.
fn replayable(named: Named) -> Vec<Uuid> {
    match named {
        Named::Letter(id) => vec![id],
        Named::LettersOfEvent(letters) => {
            let open = letters.iter().filter(|letter| letter.status != DeadLetterStatus::Processed);
            open.map(|letter| letter.id).collect()
        }
    }
}

/// Nothing that was asked for may go missing in silence.
fn check_replay(answer: &ReplayOut, asked: usize) -> anyhow::Result<()> {
    if (answer.matched as usize) < asked {
        anyhow::bail!(
            "only {} of {asked} dead letters can be replayed: the others are not there, or delivered",
            answer.matched
        );
    }
    let results = answer.results.as_deref().unwrap_or_default();
    let delivered = results.iter().filter(|result| result.status == DeadLetterStatus::Processed).count();
    if answer.results.is_some() && (delivered as u64) < answer.matched {
        anyhow::bail!(
            "{delivered} of {} dead letters were delivered; the others failed again or are still on their way",
            answer.matched
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
    for letter in &page.items {
        let error = letter.error.as_deref().unwrap_or_default();
        table.row([
            letter.id.to_string(),
            letter.message_id.clone(),
            letter.event_type.clone(),
            letter.subscriber_id.clone(),
            letter.status.as_str().to_owned(),
            letter.retry_count.to_string(),
            moment(letter.updated_at),
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
    // Written anew, so that no byte of it steers the terminal.
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

fn replayed(answer: &ReplayOut) -> Table {
    let Some(results) = &answer.results else {
        let id = answer.replay_id.map(|id| id.to_string()).unwrap_or_default();
        return Table::of_fields([("replay", id), ("matched", answer.matched.to_string())]);
    };
    let mut table = Table::new(["ID", "STATUS", "ERROR"]);
    for result in results {
        let error = result.error_code.clone().unwrap_or_default();
        table.row([result.id.to_string(), result.status.as_str().to_owned(), error]);
    }
    table
}

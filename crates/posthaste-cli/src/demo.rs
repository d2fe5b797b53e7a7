//! The whole pipeline in one terminal: a server, a publisher and three subscribers, two of which fail requests.

mod progress;
mod subscribers;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use posthaste_api::{BatchItem, EventIn, EventKey, ReplayIn, SubscriptionIn};
use serde_json::json;
use serde_json::value::to_raw_value;
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::config::Config;
use crate::database;
use crate::definitions::KeyFlags;
use crate::embedded::{EmbeddedServer, StartError};
use crate::output::{Table, print, say};
use crate::serve::StopSignals;
use crate::telemetry;

use progress::Progress;
use subscribers::{Manner, Subscriber};

const EVENT_TYPE: &str = "order.placed";
/// Publishing takes about this many steps, so that the user can watch the progress.
const STEPS: u64 = 30;
const STEP: Duration = Duration::from_millis(100);
/// More events than this are published as fast as the server accepts them.
const MAX_PACED_EVENTS: u64 = 15_000;
const MAX_BATCH: u64 = 500;
/// The demo polls the server's dead letters this often.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The subscriber that is down comes up when its dead letters have no retries left, or after this time.
const LONGEST_OUTAGE: Duration = Duration::from_secs(12);
/// The demo gives up if no event arrives at any subscriber for this long.
const STANDSTILL: Duration = Duration::from_secs(20);
/// How many dead letters one replay request contains, and how long the request waits for their results.
const REPLAY: u32 = 500;
const REPLAY_WAIT: Duration = Duration::from_secs(10);

#[derive(clap::Args)]
pub struct DemoOptions {
    /// How many events to publish
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    events: u64,
    /// Keep the server and the subscribers running afterwards, until Ctrl-C
    #[arg(long)]
    keep: bool,
}

pub async fn run(options: &DemoOptions) -> anyhow::Result<()> {
    // The demo fails deliveries on purpose: warnings about them would look like real problems.
    telemetry::start_logging("error")?;
    let mut signals = StopSignals::listen()?;
    let folder = tempfile::Builder::new().prefix("posthaste-demo-").tempdir().context("no temporary folder")?;
    let config = throwaway(folder.path());
    let server = start_server(config.clone()).await?;
    let url = server.url();
    say(format_args!("  API       {url}/api"));
    say(format_args!("  Metrics   {url}/metrics"));
    say(format_args!("  Database  {} (throwaway)\n", database::name(&config.database.url)));

    let demo = Demo::prepare(Client::new(&url)?, options.events, config.dlt.max_retry).await?;
    let played = tokio::select! {
        played = demo.play() => played,
        () = signals.next() => Err(anyhow::anyhow!("interrupted")),
    };
    let ended = match played {
        Ok(()) => demo.summarise().await,
        Err(error) => Err(error),
    };
    if options.keep && ended.is_ok() {
        say(format_args!("\nthe server is still running at {url}; try these commands, and press Ctrl-C to stop it:"));
        say(format_args!("  posthaste --server {url} dlt list --status ALL"));
        say(format_args!("  posthaste --server {url} subscriptions list"));
        signals.next().await;
    }
    tokio::select! {
        stopped = server.stop() => stopped?,
        () = signals.next() => {}
    }
    ended
}

/// The default configuration, except that dead letters are retried every second to keep the demo short.
fn throwaway(folder: &std::path::Path) -> Config {
    let mut config = Config::default();
    config.database.url = format!("sqlite://{}", folder.join("posthaste.db").display());
    config.dlt.retry_interval = Duration::from_secs(1);
    config
}

async fn start_server(mut config: Config) -> Result<EmbeddedServer, StartError> {
    match EmbeddedServer::start(&config, posthaste_hub::Roles::default()).await {
        Err(StartError::AddressInUse { .. }) => {
            config.http.listen.set_port(0);
            EmbeddedServer::start(&config, posthaste_hub::Roles::default()).await
        }
        started => started,
    }
}

struct Demo {
    client: Client,
    events: u64,
    published: AtomicU64,
    subscribers: [Subscriber; 3],
    /// After this many scheduled retries, only an operator can have a dead letter sent again.
    max_retry: u32,
    progress: Progress,
}

impl Demo {
    async fn prepare(client: Client, events: u64, max_retry: u32) -> anyhow::Result<Self> {
        let subscribers = [
            Subscriber::start("healthy", Manner::Healthy).await?,
            Subscriber::start("flaky", Manner::Flaky).await?,
            Subscriber::start("down", Manner::Down).await?,
        ];
        let key = KeyFlags { event_type: Some(EVENT_TYPE.to_owned()), ..KeyFlags::default() };
        client.create_definition(&key.definition(Some("for the demo".to_owned()))).await?;
        for subscriber in &subscribers {
            let subscription = SubscriptionIn {
                subscriber_id: subscriber.name().to_owned(),
                event_key: Some(EventKey { event_type: EVENT_TYPE.to_owned(), ..EventKey::default() }),
                endpoint: subscriber.endpoint(),
                ..SubscriptionIn::default()
            };
            client.create_subscription(&subscription).await?;
        }
        let progress = Progress::new(events, subscribers.each_ref().map(Subscriber::name));
        Ok(Self { client, events, published: AtomicU64::new(0), subscribers, max_retry, progress })
    }

    async fn play(&self) -> anyhow::Result<()> {
        let work = async {
            self.publish().await?;
            self.progress
                .message("all events are published; those for the subscriber that is down become dead letters");
            self.wait_for_exhaustion().await?;
            for subscriber in &self.subscribers {
                subscriber.come_up();
            }
            self.progress.message("the subscriber that was down is up; its dead letters are replayed through the API");
            self.replay_until_all_arrive().await
        };
        let result = tokio::select! {
            result = work => result,
            error = self.show_progress() => Err(error),
        };
        // Update once more, so that the screen shows the final state.
        self.update_progress().await?;
        self.progress.finish();
        result
    }

    async fn publish(&self) -> anyhow::Result<()> {
        let batch = (self.events / STEPS).clamp(1, MAX_BATCH);
        let mut first = 0;
        while first < self.events {
            let next = (first + batch).min(self.events);
            let events = (first..next).map(order).collect::<Result<Vec<_>, _>>()?;
            let answer = self.client.publish_batch(Bytes::from(serde_json::to_vec(&events)?)).await?;
            for result in answer.results {
                if let BatchItem::Refused { detail, .. } = result {
                    anyhow::bail!("an event was refused: {detail}");
                }
            }
            self.published.store(next, Ordering::Relaxed);
            first = next;
            if self.events <= MAX_PACED_EVENTS {
                sleep(STEP).await;
            }
        }
        Ok(())
    }

    /// Waits until the dead letters of the subscriber that is down have used up their scheduled retries.
    async fn wait_for_exhaustion(&self) -> anyhow::Result<()> {
        let outage = Instant::now();
        let down = self.subscribers.iter().find(|subscriber| subscriber.is_down());
        let Some(down) = down else { return Ok(()) };
        let query = [
            ("subscriberId", Some(down.name().to_owned())),
            ("status", Some("ALL".to_owned())),
            ("sort", Some("retryCount".to_owned())),
            ("size", Some("1".to_owned())),
        ];
        while outage.elapsed() < LONGEST_OUTAGE {
            let page = self.client.dead_letters(&query).await?;
            let fewest = page.items.first().map(|dead_letter| dead_letter.retry_count);
            if page.total >= self.events && fewest.is_some_and(|retries| retries >= self.max_retry) {
                break;
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    async fn replay_until_all_arrive(&self) -> anyhow::Result<()> {
        let (mut best, mut since) = (0, Instant::now());
        loop {
            let arrived = self.subscribers.iter().map(Subscriber::arrived).sum();
            if arrived == self.events * self.subscribers.len() as u64 {
                return Ok(());
            } else if arrived > best {
                (best, since) = (arrived, Instant::now());
            } else if since.elapsed() > STANDSTILL {
                // The summary shows which events are missing.
                return Ok(());
            }
            self.replay_exhausted().await?;
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Replays the dead letters that have no retries left, as an operator would.
    async fn replay_exhausted(&self) -> anyhow::Result<()> {
        let query = [
            ("status", Some("FAILED".to_owned())),
            ("sort", Some("-retryCount".to_owned())),
            ("size", Some(REPLAY.to_string())),
        ];
        let mut dead_letters = self.client.dead_letters(&query).await?.items;
        dead_letters.retain(|dead_letter| dead_letter.retry_count >= self.max_retry);
        if dead_letters.is_empty() {
            return Ok(());
        }
        let ids = dead_letters.iter().map(|dead_letter| dead_letter.id).collect();
        let replay = ReplayIn { ids, reason: Some("the subscriber is back".to_owned()) };
        self.client.replay(&replay, Some(REPLAY_WAIT)).await?;
        for subscriber in &self.subscribers {
            let replayed = dead_letters.iter().filter(|dead_letter| dead_letter.subscriber_id == subscriber.name());
            subscriber.add_replayed(replayed.map(|dead_letter| dead_letter.id));
        }
        Ok(())
    }

    /// Shows the progress until an error occurs, and returns the error.
    async fn show_progress(&self) -> anyhow::Error {
        loop {
            if let Err(error) = self.update_progress().await {
                return error;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn update_progress(&self) -> anyhow::Result<()> {
        let mut waiting = [DeadLetterCount::default(); 3];
        for (waiting, subscriber) in waiting.iter_mut().zip(&self.subscribers) {
            *waiting = self
                .count_dead_letters(subscriber, "NEW")
                .await?
                .plus(self.count_dead_letters(subscriber, "FAILED").await?);
        }
        let arrived = self.subscribers.each_ref().map(Subscriber::arrived);
        self.progress.show(self.published.load(Ordering::Relaxed), arrived, waiting);
        Ok(())
    }

    async fn count_dead_letters(&self, subscriber: &Subscriber, status: &str) -> anyhow::Result<DeadLetterCount> {
        let query = [
            ("subscriberId", Some(subscriber.name().to_owned())),
            ("status", Some(status.to_owned())),
            ("size", Some("1".to_owned())),
        ];
        let page = self.client.dead_letters(&query).await?;
        Ok(DeadLetterCount { count: page.total, or_more: page.total_is_lower_bound })
    }

    /// Prints a table of all subscribers, then how many events arrived at every one of them.
    async fn summarise(&self) -> anyhow::Result<()> {
        let mut table = Table::new(["SUBSCRIBER", "EXPECTED", "ARRIVED", "DUPLICATES", "DEAD-LETTERED", "REPLAYED"]);
        for subscriber in &self.subscribers {
            table.row([
                subscriber.name().to_owned(),
                self.events.to_string(),
                subscriber.arrived().to_string(),
                subscriber.duplicates().to_string(),
                self.count_dead_letters(subscriber, "ALL").await?.to_string(),
                subscriber.replayed().to_string(),
            ]);
        }
        let everywhere = |index: &u64| {
            let id = event_id(*index);
            self.subscribers.iter().all(|subscriber| subscriber.has(&id))
        };
        let arrived = (0..self.events).filter(everywhere).count() as u64;
        say("");
        print(format_args!("{table}\n{arrived} of {} events arrived\n", self.events))?;
        match arrived == self.events {
            true => Ok(()),
            false => anyhow::bail!("{} events did not arrive at every subscriber", self.events - arrived),
        }
    }
}

/// A number of dead letters. The server stops counting at a limit; then the real number may be higher.
#[derive(Clone, Copy, Default)]
struct DeadLetterCount {
    count: u64,
    or_more: bool,
}

impl DeadLetterCount {
    fn plus(self, other: Self) -> Self {
        Self { count: self.count + other.count, or_more: self.or_more || other.or_more }
    }
}

impl fmt::Display for DeadLetterCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.count, if self.or_more { " or more" } else { "" })
    }
}

fn event_id(index: u64) -> String {
    format!("demo-{index}")
}

fn order(index: u64) -> serde_json::Result<EventIn> {
    Ok(EventIn {
        event_id: Some(event_id(index)),
        event_type: EVENT_TYPE.to_owned(),
        source_service: "shop".to_owned(),
        payload: Some(to_raw_value(&json!({ "order": index, "cents": 100 + index * 7 % 9_900 }))?),
        ..EventIn::default()
    })
}

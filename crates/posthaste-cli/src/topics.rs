use clap::{Subcommand, ValueEnum};
use posthaste_api::{GroupPosition, ResetIn, ResetTo, Topic, TopicList, TopicPartition};

use crate::client::Client;
use crate::output::{Output, Table, say};
use crate::tail::{self, TailOptions};

#[derive(Subcommand)]
pub enum TopicsCommand {
    /// List the topics
    List,
    /// Show the position of each group in each partition, and how many records follow
    Lag {
        /// Only this group
        #[arg(long)]
        group: Option<String>,
        /// Only this topic
        #[arg(long)]
        topic: Option<String>,
    },
    /// Print the records of a topic, each as one line of JSON
    Tail(TailOptions),
    /// Move a group to another position, for example after its position was lost
    Reset {
        /// Topic to reset
        topic: String,
        /// Group to move
        #[arg(long)]
        group: String,
        /// Only this partition [default: all partitions of the topic]
        #[arg(long)]
        partition: Option<u32>,
        /// Where the group goes on
        #[arg(long, value_enum)]
        to: To,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub enum To {
    /// At the earliest record: delivers records again that were done
    Earliest,
    /// At the next record: skips records that were not done
    Latest,
}

pub async fn run(command: TopicsCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        TopicsCommand::List => output.print(&client.topics().await?, list),
        TopicsCommand::Lag { group, topic } => {
            let mut topics = client.topics().await?;
            let is_wanted = |wanted: &Option<String>, name: &str| wanted.as_deref().is_none_or(|wanted| wanted == name);
            // On Kafka the id of a group begins with a prefix.
            let is_id = |name: &str| group.as_ref().is_some_and(|group| group.ends_with(&format!(".{name}")));
            topics.items.retain(|item| is_wanted(&topic, &item.topic));
            for partition in topics.items.iter_mut().flat_map(|item| &mut item.partitions) {
                partition.groups.retain(|position| is_wanted(&group, &position.group) || is_id(&position.group));
            }
            if (group.is_some() || topic.is_some()) && positions(&topics).next().is_none() {
                anyhow::bail!("no such group reads such a topic: `posthaste topics lag` shows all of them");
            }
            output.print(&topics, lag)?;
            if positions(&topics).any(|(.., position)| position.position_lost) {
                say("a group does not read the partitions with a LOST position until you run `posthaste topics reset`");
            }
            Ok(())
        }
        TopicsCommand::Tail(options) => tail::run(options, client).await,
        TopicsCommand::Reset { topic, group, partition, to } => {
            let to = match to {
                To::Earliest => ResetTo::Earliest,
                To::Latest => ResetTo::Latest,
            };
            let reset = client.reset_position(&ResetIn { topic, group, partition, to: Some(to) }).await?;
            output.print(&reset, |reset| Table::of_fields([("partitions", reset.partitions.to_string())]))
        }
    }
}

fn list(topics: &TopicList) -> Table {
    let mut table = Table::new(["TOPIC", "PARTITIONS", "RECORDS", "GROUPS"]);
    for topic in &topics.items {
        let records: i64 =
            topic.partitions.iter().map(|partition| partition.next_offset - partition.first_offset).sum();
        let mut groups: Vec<&str> = topic
            .partitions
            .iter()
            .flat_map(|partition| &partition.groups)
            .map(|position| position.group.as_str())
            .collect();
        groups.sort_unstable();
        groups.dedup();
        table.row([topic.topic.clone(), topic.partitions.len().to_string(), records.to_string(), groups.join(", ")]);
    }
    table
}

fn lag(topics: &TopicList) -> Table {
    let mut table = Table::new(["GROUP", "TOPIC", "PARTITION", "POSITION", "FIRST", "NEXT", "LAG"]);
    for (topic, partition, position) in positions(topics) {
        let behind = if position.position_lost { "LOST".to_owned() } else { position.lag.to_string() };
        table.row([
            position.group.clone(),
            topic.topic.clone(),
            partition.partition.to_string(),
            position.position.to_string(),
            partition.first_offset.to_string(),
            partition.next_offset.to_string(),
            behind,
        ]);
    }
    table
}

fn positions(topics: &TopicList) -> impl Iterator<Item = (&Topic, &TopicPartition, &GroupPosition)> {
    topics.items.iter().flat_map(|topic| {
        let partitions = topic.partitions.iter();
        partitions.flat_map(move |partition| partition.groups.iter().map(move |position| (topic, partition, position)))
    })
}

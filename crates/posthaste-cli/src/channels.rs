use clap::Subcommand;
use posthaste_api::{ChannelList, ChannelOut, ChannelState};

use crate::client::Client;
use crate::output::{Output, Table};

#[derive(Subcommand)]
pub enum ChannelsCommand {
    /// List the channels: whether they publish, and how long their oldest event waits
    List,
    /// Stop publishing the events of a type; they are accepted and wait
    Pause {
        /// Event type of the channel
        event_type: String,
    },
    /// Publish the events of a type again
    Resume {
        /// Event type of the channel
        event_type: String,
    },
}

pub async fn run(command: ChannelsCommand, client: &Client, output: Output) -> anyhow::Result<()> {
    match command {
        ChannelsCommand::List => {
            output.print(&client.channels().await?, |channels: &ChannelList| table(&channels.items))
        }
        ChannelsCommand::Pause { event_type } => one(&client.pause_channel(&event_type, true).await?, output),
        ChannelsCommand::Resume { event_type } => one(&client.pause_channel(&event_type, false).await?, output),
    }
}

fn one(channel: &ChannelOut, output: Output) -> anyhow::Result<()> {
    output.print(channel, |channel| table(std::slice::from_ref(channel)))
}

fn table(channels: &[ChannelOut]) -> Table {
    let mut table = Table::new(["EVENT TYPE", "STATUS", "LAG", "TOPIC", "ERROR"]);
    for channel in channels {
        let status = match channel.status {
            ChannelState::Running => "running",
            ChannelState::Paused => "paused",
            ChannelState::Disabled => "disabled",
            ChannelState::Failing => "failing",
        };
        table.row([
            channel.event_type.clone(),
            status.to_owned(),
            format!("{:.1}s", channel.lag_seconds),
            channel.topic.clone(),
            channel.last_error.clone().unwrap_or_default(),
        ]);
    }
    table
}

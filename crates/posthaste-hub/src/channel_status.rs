use posthaste_api::{ChannelList, ChannelOut, ChannelState, SourceList};
use posthaste_core::StoreError;

use crate::Hub;
use crate::channels::ChannelStatus;

impl Hub {
    /// All channels.
    pub async fn channel_list(&self) -> Result<ChannelList, StoreError> {
        let items = self.channels.list().await?.into_iter().map(shown).collect();
        Ok(ChannelList { items })
    }

    /// Pauses or resumes a channel. Returns `None` if there is no such channel.
    pub async fn pause_channel(&self, event_type: &str, is_paused: bool) -> Result<Option<ChannelOut>, StoreError> {
        if !self.channels.set_paused(event_type, is_paused).await? {
            return Ok(None);
        }
        let mut channels = self.channels.list().await?.into_iter();
        Ok(channels.find(|channel| channel.event_type == event_type).map(shown))
    }

    /// All sources.
    pub async fn source_list(&self) -> SourceList {
        self.sources.list().await
    }
}

fn shown(channel: ChannelStatus) -> ChannelOut {
    let ChannelStatus { event_type, topic, is_enabled, is_paused, failure, lag } = channel;
    let status = match (is_enabled, is_paused, &failure) {
        (false, ..) => ChannelState::Disabled,
        (true, true, _) => ChannelState::Paused,
        (true, false, Some(_)) => ChannelState::Failing,
        (true, false, None) => ChannelState::Running,
    };
    ChannelOut { event_type, topic: topic.to_string(), status, lag_seconds: lag.as_secs_f64(), last_error: failure }
}

use serde::{Deserialize, Serialize};

use crate::checks::Errors;
use crate::input::Input;
use crate::problem::FieldError;

/// All topics of the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicList {
    /// Sorted by name.
    pub items: Vec<Topic>,
}

/// A topic of the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Topic {
    /// The name.
    pub topic: String,
    /// Its partitions, in order.
    pub partitions: Vec<TopicPartition>,
}

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicPartition {
    /// The number.
    pub partition: u32,
    /// The lowest offset that exists, or the next one if there are no records.
    pub first_offset: i64,
    /// The offset that the next record gets.
    pub next_offset: i64,
    /// The groups that read it.
    pub groups: Vec<GroupPosition>,
}

/// The position of a group in a partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupPosition {
    /// The group.
    pub group: String,
    /// The lowest offset that the group has not done.
    pub position: i64,
    /// How many records follow from this position on. Some of them may be done already.
    pub lag: u64,
    /// True if the position does not exist, for example because retention has removed the record. The group does not
    /// read the partition until an operator resets the position.
    pub position_lost: bool,
}

/// A reset of the position of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResetIn {
    /// The topic.
    #[serde(default)]
    pub topic: String,
    /// The group.
    #[serde(default)]
    pub group: String,
    /// The partition; all partitions of the topic if it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<u32>,
    /// Where the group goes on.
    #[serde(default)]
    pub to: Option<ResetTo>,
}

/// A reset that obeys every rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reset {
    /// The topic.
    pub topic: String,
    /// The group.
    pub group: String,
    /// The partition; `None`: all partitions of the topic.
    pub partition: Option<u32>,
    /// Where the group goes on.
    pub to: ResetTo,
}

/// Where a group goes on after a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ResetTo {
    /// At the earliest record that exists. Records that were done are delivered again.
    Earliest,
    /// At the next record that is published. Records that were not done are skipped.
    Latest,
}

impl Input for ResetIn {
    type Checked = Reset;

    fn validate(self) -> Result<Reset, Vec<FieldError>> {
        let mut errors = Errors::default();
        let Self { topic, group, partition, to } = self;
        for (field, value) in [("topic", &topic), ("group", &group)] {
            if value.is_empty() {
                errors.add(field, "is empty");
            }
        }
        if to.is_none() {
            errors.add("to", "is missing: earliest or latest");
        }
        let to = to.unwrap_or(ResetTo::Earliest);
        errors.none_or(Reset { topic, group, partition, to })
    }
}

/// The response to a reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResetOut {
    /// How many partitions have a new position.
    pub partitions: u64,
}

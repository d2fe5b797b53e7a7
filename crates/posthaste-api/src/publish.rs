use serde::{Deserialize, Serialize};

/// The most events of one batch.
pub const MAX_BATCH: usize = 1_000;

/// The response to one published event: it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishOut {
    /// The caller's id, or a generated one.
    pub event_id: String,
}

/// The response to a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BatchOut {
    /// One for each event, in the order of the request.
    pub results: Vec<BatchItem>,
}

/// The result for one event of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchItem {
    /// It is stored, now or since an earlier call.
    #[serde(rename_all = "camelCase")]
    Stored {
        /// The caller's id, or a generated one.
        event_id: String,
        /// The status that it would have had alone: 202, or 200 if it was stored before.
        status: u16,
    },
    /// It is not stored.
    Refused {
        /// The status that it would have had alone, such as 400 or 409.
        status: u16,
        /// A stable word for programs.
        code: String,
        /// What is wrong with it.
        detail: String,
    },
}

use std::sync::Arc;

use posthaste_core::bus::PublishError;
use posthaste_core::{FaultKind, StoreError};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

pub(crate) fn failed(doing: &str, error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::new(doing, FaultKind::Transient, error)
}

/// The error of a client that cannot be created. It does not show the values of settings, which may be secrets.
pub(crate) fn not_created(error: KafkaError) -> StoreError {
    const DOING: &str = "create a Kafka client";
    match error {
        KafkaError::ClientConfig(_, why, name, _) => {
            let hint = match why.contains("OpenSSL not available") {
                true => ": build with the feature kafka-tls",
                false => "",
            };
            StoreError::new(DOING, FaultKind::Permanent, format!("setting {name}: {why}{hint}"))
        }
        other => failed(DOING, other),
    }
}

/// The error of one record: refused for good, or not accepted now.
pub(crate) fn publish_error(error: &KafkaError) -> PublishError {
    match error.rdkafka_error_code() {
        Some(code) if is_refusal(code) => PublishError::Refused { reason: code.to_string() },
        _ => unavailable(error.clone()),
    }
}

pub(crate) fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> PublishError {
    PublishError::Unavailable(Arc::new(failed("publish to Kafka", error)))
}

fn is_refusal(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::MessageSizeTooLarge
            | RDKafkaErrorCode::InvalidMessageSize
            | RDKafkaErrorCode::InvalidRecord
            | RDKafkaErrorCode::InvalidTopic
    )
}

/// True if the cluster refused a batch of records because of one of them, or because of the size of the batch.
pub(crate) fn is_of_batch(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            RDKafkaErrorCode::MessageSizeTooLarge
                | RDKafkaErrorCode::InvalidMessageSize
                | RDKafkaErrorCode::InvalidRecord
        )
    )
}

/// True if a commit failed because the group is being rebalanced. It is repeated after the next assignment.
pub(crate) fn is_rebalance(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::IllegalGeneration
            | RDKafkaErrorCode::RebalanceInProgress
            | RDKafkaErrorCode::UnknownMemberId
            | RDKafkaErrorCode::StaleMemberEpoch
    )
}

/// True if a commit of several partitions may have failed because of one of them.
pub(crate) fn is_of_one_partition(code: RDKafkaErrorCode) -> bool {
    matches!(
        code,
        RDKafkaErrorCode::OffsetMetadataTooLarge
            | RDKafkaErrorCode::TopicAuthorizationFailed
            | RDKafkaErrorCode::UnknownTopicOrPartition
    )
}

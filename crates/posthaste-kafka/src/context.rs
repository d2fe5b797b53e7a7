use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use posthaste_core::lock;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{ClientContext, TopicPartitionList};

/// Writes what the client library says to the log.
#[derive(Default)]
pub(crate) struct LoggingContext {
    last_error: Mutex<Option<String>>,
}

impl LoggingContext {
    /// The last error that a poll of the client reported. It says more than the error of a call, for example that a
    /// password is wrong.
    pub(crate) fn last_error(&self) -> Option<String> {
        lock(&self.last_error).clone()
    }
}

impl ClientContext for LoggingContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        log_error(&error, reason);
        // That all brokers are down only follows from what was reported before.
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::AllBrokersDown) {
            *lock(&self.last_error) = Some(reason.to_owned());
        }
    }
}

impl ConsumerContext for LoggingContext {}

pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, message: &str) {
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical | RDKafkaLogLevel::Error => {
            tracing::warn!(facility, message, "the Kafka client reports an error");
        }
        _ => tracing::debug!(facility, message, "the Kafka client reports"),
    }
}

pub(crate) fn log_error(error: &KafkaError, reason: &str) {
    tracing::debug!(%error, reason, "the Kafka client reports an error");
}

/// Something that happened while the consumer was polled, and that its thread handles after the poll.
pub(crate) enum Event {
    Assigned(Vec<(String, i32)>),
    Revoked(Vec<(String, i32)>),
}

/// Collects the events of a consumer. The rebalance callback does not assign by itself: that would keep the thread from
/// polling while positions are read, or while records in flight are waited for.
#[derive(Default)]
pub(crate) struct EventContext {
    events: Mutex<VecDeque<Event>>,
    /// The consumer is being closed: nobody handles events any more.
    is_closing: AtomicBool,
}

impl EventContext {
    pub(crate) fn next(&self) -> Option<Event> {
        lock(&self.events).pop_front()
    }

    pub(crate) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
    }
}

impl ClientContext for EventContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        log_error(&error, reason);
    }
}

impl ConsumerContext for EventContext {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, code: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let is_assigned = code == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        if self.is_closing.load(Ordering::Acquire) {
            let answered = match is_assigned {
                true => consumer.incremental_assign(&TopicPartitionList::new()),
                false => consumer.incremental_unassign(list),
            };
            if let Err(error) = answered {
                tracing::debug!(%error, "a rebalance during the close of a consumer was not answered");
            }
            return;
        }
        let partitions = partitions(list);
        let event = if is_assigned { Event::Assigned(partitions) } else { Event::Revoked(partitions) };
        lock(&self.events).push_back(event);
    }
}

fn partitions(list: &TopicPartitionList) -> Vec<(String, i32)> {
    list.elements().iter().map(|element| (element.topic().to_owned(), element.partition())).collect()
}

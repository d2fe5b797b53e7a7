use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_core::bus::{PublishError, Record};
use posthaste_core::lock;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::{ClientConfig, ClientContext};
use tokio::sync::Notify;

use crate::context::{log, log_error};
use crate::errors::{is_of_batch, publish_error, unavailable};
use crate::options::KafkaOptions;
use crate::topics::TopicCreator;

/// How long a publish waits for room when the queue of the client is full.
const FULL_PAUSE: Duration = Duration::from_millis(5);

type Client = ThreadedProducer<Deliveries>;

/// The producer of this process. Each publish is one batch, which is answered as a whole.
pub(crate) struct Producer {
    options: KafkaOptions,
    client: Mutex<Arc<Client>>,
    /// A client that sends each record alone. It is created when a batch is refused.
    single: Mutex<Option<Arc<Client>>>,
}

/// The results of one publish.
struct Batch {
    results: Mutex<Vec<Result<(), PublishError>>>,
    /// The records that were refused with others, and may be accepted alone.
    refused_together: Mutex<Vec<usize>>,
    /// How many records have no result yet.
    left: AtomicUsize,
    done: Notify,
}

/// A record of a batch that was given to the client.
pub(crate) struct Sent {
    batch: Arc<Batch>,
    index: usize,
}

impl Batch {
    fn new(count: usize) -> Arc<Self> {
        let results = Mutex::new(vec![Ok(()); count]);
        Arc::new(Self {
            results,
            refused_together: Mutex::default(),
            left: AtomicUsize::new(count),
            done: Notify::new(),
        })
    }

    fn finish(&self, index: usize, result: Result<(), PublishError>) {
        if result.is_err() {
            lock(&self.results)[index] = result;
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_one();
        }
    }

    async fn results(&self) -> Vec<Result<(), PublishError>> {
        while self.left.load(Ordering::Acquire) > 0 {
            self.done.notified().await;
        }
        std::mem::take(&mut *lock(&self.results))
    }
}

/// Receives the results of records from the client.
pub(crate) struct Deliveries {
    /// A broker answers with the offset of a record, unless no answer was asked for (acks = 0).
    has_offsets: bool,
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        log_error(&error, reason);
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Sent>;

    fn delivery(&self, result: &DeliveryResult<'_>, sent: Box<Sent>) {
        let result = match result {
            Ok(message) if self.has_offsets && message.offset() < 0 => Err(unknown_offset()),
            Ok(_) => Ok(()),
            Err((error, message)) => {
                tracing::debug!(topic = message.topic(), %error, "a record was not accepted");
                if is_of_batch(error) {
                    lock(&sent.batch.refused_together).push(sent.index);
                }
                Err(publish_error(error))
            }
        };
        sent.batch.finish(sent.index, result);
    }
}

impl Producer {
    pub(crate) fn new(options: &KafkaOptions) -> KafkaResult<Self> {
        let client = create(options.producer_config(), options)?;
        Ok(Self { client: Mutex::new(Arc::new(client)), single: Mutex::default(), options: options.clone() })
    }

    pub(crate) async fn publish(
        &self,
        records: Vec<Record>,
        partitions: &HashMap<Arc<str>, Result<u32, PublishError>>,
        topics: &TopicCreator,
    ) -> Vec<Result<(), PublishError>> {
        let client = Arc::clone(&lock(&self.client));
        let all: Vec<&Record> = records.iter().collect();
        let (mut results, refused_together) = send_all(&client, &all, partitions).await;
        if !refused_together.is_empty() {
            // The limit of a topic holds for the batch of a request too, and a batch may contain a record that is refused.
            let again: Vec<&Record> = refused_together.iter().map(|&index| &records[index]).collect();
            for (index, result) in refused_together.into_iter().zip(self.send_alone(&again, partitions).await) {
                results[index] = result;
            }
        }
        for (record, result) in records.iter().zip(&results) {
            if result.is_err() {
                // The topic may have been deleted or created anew.
                topics.forget(&record.topic);
            }
        }
        self.replace_after_fatal_error(&client);
        results
    }

    /// Sends each record in a request of its own.
    async fn send_alone(
        &self,
        records: &[&Record],
        partitions: &HashMap<Arc<str>, Result<u32, PublishError>>,
    ) -> Vec<Result<(), PublishError>> {
        let client = match self.single_client() {
            Ok(client) => client,
            Err(error) => return vec![Err(unavailable(error)); records.len()],
        };
        let (results, _) = send_all(&client, records, partitions).await;
        if client.client().fatal_error().is_some() {
            // The next use creates another one.
            lock(&self.single).take();
        }
        results
    }

    fn single_client(&self) -> KafkaResult<Arc<Client>> {
        let mut single = lock(&self.single);
        if let Some(client) = &*single {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(create(self.options.single_producer_config(), &self.options)?);
        Ok(Arc::clone(single.insert(client)))
    }

    /// An idempotent producer cannot go on after a fatal error, for example when the broker has forgotten it.
    fn replace_after_fatal_error(&self, failed: &Arc<Client>) {
        let Some((code, reason)) = failed.client().fatal_error() else { return };
        let mut client = lock(&self.client);
        if !Arc::ptr_eq(&client, failed) {
            return;
        }
        match create(self.options.producer_config(), &self.options) {
            Ok(new) => {
                tracing::warn!(%code, reason, "the Kafka producer failed for good and was replaced");
                *client = Arc::new(new);
            }
            Err(error) => tracing::error!(%code, reason, %error, "the Kafka producer failed and cannot be replaced"),
        }
    }
}

/// The client takes a record for stored because the broker says that its sequence number is a duplicate, and the broker
/// does not know where it is. That is also so if the record was never stored: the first request for a new partition failed,
/// later requests were accepted, and the repeated first request looks old. The record is published again.
fn unknown_offset() -> PublishError {
    tracing::warn!("Kafka did not say where it stored a record: it is published again");
    unavailable(KafkaError::MessageProduction(RDKafkaErrorCode::DuplicateSequenceNumber))
}

fn create(config: ClientConfig, options: &KafkaOptions) -> KafkaResult<Client> {
    config.create_with_context(Deliveries { has_offsets: options.acks != "0" })
}

/// Gives records to the client and waits for their results. Returns also which records were refused together with others.
async fn send_all(
    client: &Client,
    records: &[&Record],
    partitions: &HashMap<Arc<str>, Result<u32, PublishError>>,
) -> (Vec<Result<(), PublishError>>, Vec<usize>) {
    let batch = Batch::new(records.len());
    for (index, record) in records.iter().enumerate() {
        let partition = record.check_size().and_then(|()| match partitions.get(&record.topic) {
            Some(partitions) => partitions.clone().map(|partitions| (record.route % u64::from(partitions)) as i32),
            None => Ok(0),
        });
        let sent = match partition {
            Ok(partition) => send(client, record, partition, Sent { batch: Arc::clone(&batch), index }).await,
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            batch.finish(index, Err(error));
        }
    }
    let results = batch.results().await;
    let refused_together = std::mem::take(&mut *lock(&batch.refused_together));
    (results, refused_together)
}

/// Gives a record to the client. Waits while the queue of the client is full.
async fn send(client: &Client, record: &Record, partition: i32, sent: Sent) -> Result<(), PublishError> {
    let headers =
        record.headers.iter().fold(OwnedHeaders::new_with_capacity(record.headers.len()), |headers, header| {
            headers.insert(Header { key: &header.0, value: Some(&header.1) })
        });
    let mut next = BaseRecord::with_opaque_to(&record.topic, Box::new(sent))
        .partition(partition)
        .key(&record.key)
        .payload(&record.value[..])
        .headers(headers);
    loop {
        match client.send(next) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), unsent)) => {
                next = unsent;
                tokio::time::sleep(FULL_PAUSE).await;
            }
            Err((error, _)) => return Err(publish_error(&error)),
        }
    }
}

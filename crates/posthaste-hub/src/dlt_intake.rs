use async_trait::async_trait;
use posthaste_api::proto::OutboxEvent;
use posthaste_core::hub_store::DeadLetterSource;
use posthaste_core::{BusItem, Delivery, Failure, Load, Outcome, Sink, parts};

use crate::envelope;
use crate::settings::DltSettings;

/// What one write inserts. Other writes wait meanwhile.
const INSERTED_AT_ONCE: Load = Load { items: 25, bytes: 2 * 1024 * 1024 };

/// Inserts the records of the dead-letter topics into the table of dead letters, each delivery once.
pub(crate) struct Intake {
    pub(crate) dead_letters: DeadLetterSource,
    /// Decides if and when the first scheduled retry of a new dead letter is due.
    pub(crate) settings: DltSettings,
}

#[async_trait]
impl Sink for Intake {
    type Item = BusItem<OutboxEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        for part in parts(batch, INSERTED_AT_ONCE, Delivery::bytes) {
            let letters = part.iter().map(|delivery| envelope::new_dead_letter(&delivery.item().value, &self.settings));
            let outcome = match self.dead_letters.insert(letters.collect()).await {
                Ok(()) => Outcome::Delivered,
                Err(error) => {
                    Outcome::Failed(Failure::outage("store", "the dead letter is not stored").cause(error.chain()))
                }
            };
            part.into_iter().for_each(|delivery| delivery.report(outcome.clone()));
        }
    }
}

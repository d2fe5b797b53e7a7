use async_trait::async_trait;
use posthaste_api::proto::OutboxEvent;
use posthaste_core::{BusItem, Delivery, Failure, Outcome, Sink};
use posthaste_sql::sqlite::Letters;

use crate::envelope;
use crate::settings::DltSettings;

/// Files records of the dead-letter topics in the dead-letter store, each once.
pub(crate) struct Intake {
    pub(crate) letters: Letters,
    /// Whether and when the first scheduled retry of a new letter is due.
    pub(crate) settings: DltSettings,
}

#[async_trait]
impl Sink for Intake {
    type Item = BusItem<OutboxEvent>;

    async fn deliver(&self, batch: Vec<Delivery<Self::Item>>) {
        let letters =
            batch.iter().map(|delivery| envelope::new_letter(&delivery.item().value, &self.settings)).collect();
        let outcome = match self.letters.intake(letters).await {
            Ok(()) => Outcome::Delivered,
            Err(error) => Outcome::Failed(Failure::outage("store", "the letter is not filed").cause(error.chain())),
        };
        batch.into_iter().for_each(|delivery| delivery.report(outcome.clone()));
    }
}

//! The bus on a real Kafka, beyond the laws that every bus keeps.

mod batches;
mod fatal_errors;
mod inspect;
mod slow_cluster;
mod support;
mod transactions;

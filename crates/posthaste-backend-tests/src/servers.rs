//! Throwaway real servers, and faults to inject into them.
//!
//! [`postgres`] and [`mariadb`] create a new database on a server that the first test of a test binary starts, and
//! [`kafka`](kafka()) returns a prefix for topics on such a server. [`Postgres`], [`MariaDb`] and [`Kafka`] are servers for
//! one test, which can crash them and start them again; [`KafkaCluster`] has three brokers. A [`Cutter`] is a proxy between
//! a client and a server that cuts a connection at the worst moment. All servers and their data are removed when the
//! process ends, even if it is killed.
//!
//! If a server is not installed, the test fails with a message that says what to install. No test is skipped.

mod apicurio;
mod confluent_python;
mod cutter;
mod kafka;
mod mariadb;
mod postgres;
mod watched;

pub use apicurio::apicurio;
pub use confluent_python::confluent_python;
pub use cutter::{Cutter, Keep};
pub use kafka::{Kafka, KafkaCluster, kafka};
pub use mariadb::{MariaDb, mariadb};
pub use postgres::{Postgres, postgres};
pub use watched::CrashableServer;

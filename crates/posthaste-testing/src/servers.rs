//! Throwaway real servers, and the faults they can suffer.
//!
//! [`postgres`] and [`mariadb`] give a new database on a server that the first test of a test binary starts; [`Postgres`]
//! and [`MariaDb`] are servers of a test's own, to be crashed and started again; a [`Cutter`] stands between a client and
//! either of them and cuts a connection at the worst moment. All of it is gone when the process ends, however it ends.
//!
//! A server that is missing makes the test fail and says what to install; nothing is skipped.

mod cutter;
mod mariadb;
mod postgres;
mod watched;

pub use cutter::{Cutter, Keep};
pub use mariadb::{MariaDb, mariadb};
pub use postgres::{Postgres, postgres};

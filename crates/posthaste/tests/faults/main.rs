//! Faults with real processes and real servers: a service is killed, paused or cut off from its database, and every
//! event that it committed is still delivered.
//!
//! The service is this same program, started again with a [`node::Role`].

mod checker;
mod commit_cut_off;
mod cut_off_node;
mod database;
mod database_crash;
mod killed_node;
mod node;
mod paused_node;
mod process;

use posthaste_backend_tests::processes::Role;

/// Runs the service if this program was started as a node, and does nothing otherwise.
#[test]
fn serve_when_started_as_a_node() {
    if let Some(role) = node::Role::of_environment() {
        node::serve(role);
    }
}

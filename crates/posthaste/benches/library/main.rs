//! The performance of the library on this machine, on PostgreSQL with fsync on: `cargo bench -p posthaste`. Each figure
//! is compared with plain SQL that does the same in the same run. Names of figures as arguments select some of them;
//! `large` adds tables of ten million rows, which take minutes to fill.
//!
//! It prints one JSON object to stdout and a table for people to stderr. It starts a PostgreSQL of its own, and removes
//! it at the end.

mod drain;
mod hot;
mod probe;
mod sqlite;
mod table;

use posthaste_backend_tests::report::Report;

#[tokio::main]
async fn main() {
    // `cargo bench` passes --bench.
    let request: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let mut report = Report::new(request);
    let settings = "-c fsync=on -c synchronous_commit=on -c shared_buffers=1GB -c max_wal_size=8GB";
    let server = posthaste_backend_tests::servers::Postgres::start_with(settings).await;
    hot::measure(&mut report, server.url()).await;
    drain::measure(&mut report, server.url()).await;
    sqlite::measure(&mut report).await;
    report.print();
}

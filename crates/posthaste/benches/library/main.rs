//! What the library reaches on this machine on PostgreSQL with fsync on, each figure beside plain SQL that does the same
//! in the same run: `cargo bench -p posthaste`. Names of figures as arguments select some of them; `large` adds tables
//! of ten million rows, which take minutes to fill.
//!
//! One JSON object on stdout, a table for people on stderr. It starts a PostgreSQL of its own and takes it away again.

mod drain;
mod hot;
mod probe;
mod report;
mod table;

use report::Report;

#[tokio::main]
async fn main() {
    // `cargo bench` passes --bench.
    let request: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let mut report = Report::new(request);
    let settings = "-c fsync=on -c synchronous_commit=on -c shared_buffers=1GB -c max_wal_size=8GB";
    let server = posthaste_testing::servers::Postgres::start_with(settings).await;
    hot::measure(&mut report, server.url()).await;
    drain::measure(&mut report, server.url()).await;
    report.print();
}

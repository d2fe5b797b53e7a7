//! The throwaway servers themselves.

use std::process::Command;

use posthaste_testing::servers;

#[tokio::test]
async fn every_call_gets_a_postgresql_database_of_its_own() {
    let (first, second) = (servers::postgres().await, servers::postgres().await);
    assert_ne!(first, second);
    let table = Command::new("psql").args([&first, "-q", "-c", "CREATE TABLE here (id int)"]).status().unwrap();
    assert!(table.success());
    let absent =
        Command::new("psql").args([&second, "-At", "-c", "SELECT to_regclass('here') IS NULL"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&absent.stdout).trim(), "t");
}

use std::time::Duration;

use posthaste_backend_tests::servers;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, OutboxItem, Reader, Table};
use posthaste_core::{Claimed, Disposition, Event, Settled, Settlement, Source};
use posthaste_sql::TableName;
use posthaste_sql::mysql::OutboxStore;
use sqlx::MySqlPool;
use sqlx::mysql::MySqlPoolOptions;

use crate::server_support::server_support;

pub const MODES: [Mode; 3] = [Mode::SingleNode, Mode::MultiNode, Mode::ORDERED];

server_support!(MySql, sqlx::MySql, MySqlPool, MySqlPoolOptions, OutboxStore, servers::mariadb);

pub fn ids(items: &[Claimed<OutboxItem>]) -> Vec<&str> {
    items.iter().map(|claimed| claimed.item.event.id()).collect()
}

pub async fn settle<S: Source>(source: &S, claimed: &Claimed<S::Item>, disposition: Disposition) -> Settled {
    let settlement = Settlement { claimed, disposition: &disposition, took: Duration::from_millis(12) };
    source.settle(&[settlement]).await.unwrap()[0]
}

use posthaste_backend_tests::servers;
use posthaste_core::Event;
use posthaste_core::outbox::roles::*;
use posthaste_core::outbox::{Mode, Reader, Table};
use posthaste_sql::TableName;
use posthaste_sql::postgres::OutboxStore;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::server_support::server_support;

server_support!(Postgres, sqlx::Postgres, PgPool, PgPoolOptions, OutboxStore, servers::postgres);

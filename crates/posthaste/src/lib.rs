//! A transactional outbox for Rust services: an event that commits with your data reaches its listener, or you see why not
//! and send it again.
//!
//! Write events inside the sqlx transaction that you already have, on PostgreSQL, MySQL/MariaDB or SQLite. Right after
//! the commit a listener in this process is called; if the process dies first, it is called later, here or on another
//! node. There is no broker and no extra process.
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # mod example {
//! # use std::sync::Arc;
//! # use serde::{Deserialize, Serialize};
//! use posthaste::{Event, Mode, Outbox};
//!
//! # #[derive(Serialize, Deserialize)] struct OrderPlaced { id: i64 }
//! # async fn send_mail(order: OrderPlaced) -> Result<(), std::io::Error> { drop(order); Ok(()) }
//! # async fn service(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let outbox = Outbox::new(pool.clone())
//!     .mode(Mode::MultiNode)
//!     .listen_aggregate("order", "order.placed", |order: OrderPlaced, _event: Arc<Event>| send_mail(order))
//!     .start()
//!     .await?;
//!
//! let order = OrderPlaced { id: 7 };
//! let mut transaction = outbox.begin().await?;
//! sqlx::query("INSERT INTO orders (id) VALUES ($1)").bind(order.id).execute(&mut *transaction).await?;
//! outbox.write(&mut transaction, Event::json("order.placed", &order)?.aggregate("order", order.id)).await?;
//! transaction.commit().await?; // the listener runs microseconds later; a crash here loses nothing
//!
//! outbox.close().await;
//! # Ok(())
//! # }
//! # }
//! ```
//!
//! Choose the database with a feature: `postgres`, `mysql` or `sqlite`. The guide is in the repository under `docs/`.

#![warn(missing_docs)]

#[cfg(doctest)]
mod must_not_compile;

pub use posthaste_core::outbox::{
    BadSetting, BadTableName, DeadEvents, DeadFilter, DeadHead, HookError, InTransaction, Mode, OpenError, Outbox,
    OutboxBuilder, OutboxRow, OutboxStatus, Pool, Retention, Settings, StartError, TableName, Transaction, Unroutable,
    WriteError, WriterHook,
};
pub use posthaste_core::{
    BoxError, Delay, Event, EventBuilder, EventError, Failure, FailureClass, FaultKind, GLOBAL_AGGREGATE, Interceptor,
    IntoEvent, Listeners, MAX_EVENT_ID, MAX_FIELD, MAX_HEADERS, MAX_PAYLOAD, Outcome, Payload, RegistrationError,
    RetryPolicy, StoreError, TRACEPARENT, TraceContext,
};
pub use posthaste_sql::{DatabaseKind, MigrationText, UnknownDatabase};

/// The outbox and the inbox on MySQL and MariaDB.
#[cfg(feature = "mysql")]
pub mod mysql {
    pub use posthaste_sql::mysql::{Inbox, OutboxStore, migrations};
}

/// The outbox and the inbox on PostgreSQL.
#[cfg(feature = "postgres")]
pub mod postgres {
    pub use posthaste_sql::postgres::{Inbox, OutboxStore, migrations};
}

/// The outbox and the inbox on SQLite.
#[cfg(feature = "sqlite")]
pub mod sqlite {
    pub use posthaste_sql::sqlite::{Inbox, OutboxStore, migrations};
}

/// The examples of the guide compile.
#[cfg(all(doctest, feature = "postgres"))]
#[doc = include_str!("../../../docs/guide.md")]
mod guide {}

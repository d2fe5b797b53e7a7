//! Code that does not compile, so that no error at run time is needed. Each case begins with code that does compile.

/// A write needs a transaction: a pool or a connection is not one.
///
/// ```no_run
/// # async fn write(outbox: posthaste::Outbox<posthaste::postgres::OutboxStore>, pool: sqlx::PgPool) {
/// let mut transaction = pool.begin().await.unwrap();
/// outbox.write(&mut transaction, posthaste::Event::text("t", "{}")).await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # async fn write(outbox: posthaste::Outbox<posthaste::postgres::OutboxStore>, mut pool: sqlx::PgPool) {
/// outbox.write(&mut pool, posthaste::Event::text("t", "{}")).await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # async fn write(outbox: posthaste::Outbox<posthaste::postgres::OutboxStore>, pool: sqlx::PgPool) {
/// let mut connection = pool.acquire().await.unwrap();
/// outbox.write(&mut *connection, posthaste::Event::text("t", "{}")).await.unwrap();
/// # }
/// ```
fn b1_a_write_outside_of_a_transaction() {}

/// An event gives read access to its headers only.
///
/// ```
/// let event = posthaste::Event::text("t", "{}").header("a", "1").build().unwrap();
/// assert_eq!(event.headers().len(), 1);
/// ```
///
/// ```compile_fail,E0599
/// let event = posthaste::Event::text("t", "{}").header("a", "1").build().unwrap();
/// event.headers().push(("b".to_owned(), "2".to_owned()));
/// ```
fn a6_headers_cannot_be_changed() {}

/// A header always has a value, which may be empty.
///
/// ```
/// posthaste::Event::text("t", "{}").header("a", "");
/// ```
///
/// ```compile_fail,E0277
/// posthaste::Event::text("t", "{}").header("a", None::<String>);
/// ```
fn a7_a_header_cannot_be_nothing() {}

/// An event type is a text, or converts into one: a closure does not.
///
/// ```
/// posthaste::Event::text("order.placed", "{}");
/// ```
///
/// ```compile_fail,E0277
/// posthaste::Event::text(|| "order.placed", "{}");
/// ```
fn a13_a_type_cannot_be_anonymous() {}

/// A transaction ends once: `commit` and `rollback` consume it.
///
/// ```no_run
/// # async fn end(transaction: posthaste::Transaction<posthaste::postgres::OutboxStore>) {
/// transaction.commit().await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0382
/// # async fn end(transaction: posthaste::Transaction<posthaste::postgres::OutboxStore>) {
/// transaction.commit().await.unwrap();
/// transaction.commit().await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0382
/// # async fn end(transaction: posthaste::Transaction<posthaste::postgres::OutboxStore>) {
/// transaction.rollback().await.unwrap();
/// transaction.commit().await.unwrap();
/// # }
/// ```
fn c6_a_transaction_cannot_end_twice() {}

/// Starting consumes the builder.
///
/// ```no_run
/// # async fn start(pool: sqlx::PgPool) {
/// let builder = posthaste::Outbox::new(pool).on("t", |_| async {});
/// builder.start().await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0382
/// # async fn start(pool: sqlx::PgPool) {
/// let builder = posthaste::Outbox::new(pool).on("t", |_| async {});
/// builder.start().await.unwrap();
/// builder.start().await.unwrap();
/// # }
/// ```
fn j2_a_builder_cannot_start_twice() {}

/// The batch size of a replay is never zero.
///
/// ```no_run
/// # async fn replay(outbox: posthaste::Outbox<posthaste::postgres::OutboxStore>) {
/// let batch = std::num::NonZeroUsize::new(100).unwrap();
/// outbox.dead().replay_all(&posthaste::DeadFilter::all(), batch).await.unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0308
/// # async fn replay(outbox: posthaste::Outbox<posthaste::postgres::OutboxStore>) {
/// outbox.dead().replay_all(&posthaste::DeadFilter::all(), 0).await.unwrap();
/// # }
/// ```
fn l3_a_replay_cannot_have_an_empty_batch() {}

/// A database of a server for one test, and what the tests of PostgreSQL and of MariaDB have in common.
macro_rules! server_support {
    ($server:ident, $database:ty, $pool:ty, $options:ty, $store:ty, $start:path) => {
        /// Long enough that no lease ends by chance.
        pub const LEASE: std::time::Duration = std::time::Duration::from_secs(120);

        /// One process's view of an outbox table: it knows of other processes only through the database.
        pub async fn open(
            pool: $pool,
            table: TableName,
            reader: Reader,
            mode: Mode,
        ) -> Result<Table<$store>, posthaste_core::outbox::OpenError> {
            Table::open(posthaste_core::outbox::Pool::open(&pool, table, mode).await?, reader, LEASE).await
        }

        /// A database that is empty at first.
        pub struct $server {
            pub url: String,
            /// The pool of the service that owns this database.
            pub pool: $pool,
        }

        impl $server {
            pub async fn start() -> Self {
                let url = $start().await;
                let pool = <$options>::new().max_connections(4).connect(&url).await.unwrap();
                Self { url, pool }
            }

            pub async fn dispatcher(&self, mode: Mode) -> Table<$store> {
                open(self.pool.clone(), TableName::default(), Reader::Dispatcher, mode).await.unwrap()
            }

            /// Writes events in a transaction of the service.
            pub async fn write(&self, outbox: &Table<$store>, events: &[&Event]) {
                let mut transaction = self.pool.begin().await.unwrap();
                outbox.store().insert(&mut transaction, events, None).await.unwrap();
                transaction.commit().await.unwrap();
            }

            /// Runs plain SQL as any other program would.
            pub async fn execute(&self, sql: &'static str) {
                sqlx::raw_sql(sql).execute(&self.pool).await.unwrap();
            }

            /// One value of one row.
            pub async fn ask<T>(&self, sql: &'static str) -> T
            where
                T: for<'r> sqlx::Decode<'r, $database> + sqlx::Type<$database> + Send + Unpin,
            {
                sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
            }
        }

        pub fn event(id: &str, event_type: &str, payload: &str) -> Event {
            Event::builder(event_type).id(id.to_owned()).text(payload.to_owned()).build().unwrap()
        }
    };
}
pub(crate) use server_support;

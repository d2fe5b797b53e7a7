//! The size of the WAL of a file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use posthaste_sql::sqlite::{Database, WAL_LIMIT};
use sqlx::Sqlite;

use crate::support::{File, execute};

/// The bytes that one commit adds to the WAL, about.
const COMMIT: u64 = 1024 * 1024;

async fn open(file: &File) -> Database {
    let database = file.open().await;
    execute(&database, "CREATE TABLE filler (bytes BLOB NOT NULL); INSERT INTO filler VALUES (x'00')").await;
    database
}

fn size(file: &File) -> u64 {
    let mut path = file.path().into_os_string();
    path.push("-wal");
    std::fs::metadata(path).map_or(0, |file| file.len())
}

/// Commits until this many bytes have gone to the WAL. Returns the largest size that the WAL had.
async fn commit(database: &Database, file: &File, bytes: u64) -> u64 {
    let mut largest = 0;
    for _ in 0..bytes / COMMIT {
        let fill = database.write("fill", |connection| {
            Box::pin(async move {
                let fill = sqlx::query("UPDATE filler SET bytes = randomblob(?)").bind(COMMIT as i64);
                fill.execute(connection).await.map(|_| ())
            })
        });
        fill.await.unwrap();
        largest = largest.max(size(file));
    }
    largest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wal_shrinks_when_a_reader_that_stayed_for_long_has_ended() {
    let file = File::new();
    let database = open(&file).await;
    let mut reader = database.operators().begin().await.unwrap();
    let read = "SELECT length(bytes) FROM filler";
    assert_eq!(sqlx::query_scalar::<_, i64>(read).fetch_one(&mut *reader).await.unwrap(), 1);
    let largest = commit(&database, &file, 3 * WAL_LIMIT).await;
    assert!(largest > 2 * WAL_LIMIT, "nothing that the reader sees can leave the WAL: {largest}");
    assert_eq!(sqlx::query_scalar::<_, i64>(read).fetch_one(&mut *reader).await.unwrap(), 1);
    reader.commit().await.unwrap();
    // Without another write.
    let deadline = Instant::now() + Duration::from_secs(60);
    while size(&file) > WAL_LIMIT {
        assert!(Instant::now() < deadline, "the WAL has {} bytes", size(&file));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(sqlx::query_scalar::<_, i64>(read).fetch_one(database.readers()).await.unwrap(), COMMIT as i64);
    database.close().await;
}

/// A reader that has begun, and has read for a few milliseconds.
async fn begin_to_read(database: &Database) -> sqlx::Transaction<'static, Sqlite> {
    let mut reader = database.readers().begin().await.unwrap();
    let read = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)
        SELECT count(*) FROM n, filler";
    assert_eq!(sqlx::query_scalar::<_, i64>(read).fetch_one(&mut *reader).await.unwrap(), 20_000);
    reader
}

/// Each reader ends after the next one has begun, so SQLite itself never finds the WAL without a reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wal_stays_small_under_steady_load_with_reads_that_overlap() {
    let file = File::new();
    let database = open(&file).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (readers, stopped, mut began) = (database.clone(), stop.clone(), Instant::now());
    let mut reader = begin_to_read(&database).await;
    let reading = tokio::spawn(async move {
        let (mut readers_ended, mut longest_life) = (0, Duration::ZERO);
        while !stopped.load(Ordering::Relaxed) {
            let next_began = Instant::now();
            let next = begin_to_read(&readers).await;
            std::mem::replace(&mut reader, next).commit().await.unwrap();
            longest_life = longest_life.max(began.elapsed());
            began = next_began;
            readers_ended += 1;
        }
        reader.commit().await.unwrap();
        (readers_ended, longest_life)
    });
    let written = 8 * WAL_LIMIT;
    let largest = commit(&database, &file, written).await;
    stop.store(true, Ordering::Relaxed);
    let (readers_ended, longest_life) = reading.await.unwrap();
    assert!(readers_ended > 50, "{readers_ended} readers ended");
    // On a busy machine readers take long, and the WAL grows until one attempt to empty it outlasts them. Without attempts
    // it would have all that was written.
    assert!(largest < written * 5 / 8, "the WAL had {largest} bytes, the longest life was {longest_life:?}");
    database.close().await;
}

#[tokio::test]
async fn a_large_wal_that_an_earlier_process_left_is_emptied_at_the_start() {
    let file = File::new();
    let first = open(&file).await;
    let mut reader = first.operators().begin().await.unwrap();
    sqlx::query("SELECT bytes FROM filler").fetch_one(&mut *reader).await.unwrap();
    commit(&first, &file, 2 * WAL_LIMIT).await;
    // What a crash leaves: the files, and no connection.
    let copy = File::new();
    for ending in ["", "-wal"] {
        let path = |file: &File| format!("{}{ending}", file.path().display());
        std::fs::copy(path(&file), path(&copy)).unwrap();
    }
    assert!(size(&copy) > WAL_LIMIT);
    let second = copy.open().await;
    second.check().await.unwrap();
    assert!(size(&copy) <= WAL_LIMIT, "{}", size(&copy));
    let read = "SELECT length(bytes) FROM filler";
    assert_eq!(sqlx::query_scalar::<_, i64>(read).fetch_one(second.readers()).await.unwrap(), COMMIT as i64);
    drop(reader);
    first.close().await;
    second.close().await;
}

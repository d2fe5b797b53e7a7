//! Processes to kill, pause and stop: the test program itself, started again with a role in its environment. Each keeps
//! a diary in a file, which survives a kill.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthaste_core::lock;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The time after which a test stops waiting and fails.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The environment variable with the role of a process.
const ROLE: &str = "POSTHASTE_FAULTS_ROLE";

/// The task of a process.
pub trait Role: Serialize + DeserializeOwned {
    /// The name of the test that takes on the role if the program was started with one, and does nothing otherwise.
    const TEST: &'static str;
    /// One line of the diary.
    type Entry: Serialize + DeserializeOwned + Clone;

    /// The file that gets one line per entry.
    fn diary(&self) -> &Path;

    /// The role of this process, if it was started with one.
    fn of_environment() -> Option<Self> {
        std::env::var(ROLE).ok().map(|role| serde_json::from_str(&role).expect("a role is JSON"))
    }
}

/// A process with a role.
pub struct Process<R: Role> {
    child: Child,
    diary: DiaryReader<R::Entry>,
}

impl<R: Role> Process<R> {
    /// Starts this program again with a role.
    pub fn start(role: &R) -> Self {
        let child = Command::new(std::env::current_exe().expect("this program"))
            .args([R::TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, serde_json::to_string(role).expect("a role is JSON"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a process starts");
        Self { child, diary: DiaryReader::new(role.diary()) }
    }

    /// Sends a signal, such as STOP.
    pub fn signal(&self, name: &str) {
        let killed = Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status();
        assert!(killed.expect("the program kill is there").success());
    }

    /// Sends STOP, and waits until all threads of the process have stopped. CONT continues it.
    pub async fn pause(&self) {
        self.signal("STOP");
        wait_until("the process is paused", async || self.is_paused()).await;
    }

    fn is_paused(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the process runs");
        threads.flatten().all(|thread| {
            let status = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // The state is the first field after the name of the thread, which is in parentheses.
            status.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
        })
    }

    /// `kill -9`.
    pub fn kill(mut self) {
        self.signal("KILL");
        self.child.wait().expect("the process ends");
    }

    /// Closes the stdin of the process, and waits until it has ended without an error.
    pub fn stop(mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().expect("the process ends");
        assert!(ended.success(), "a process failed at its end: {ended}");
    }

    /// The whole lines of its diary.
    pub fn entries(&self) -> Vec<R::Entry> {
        self.diary.entries()
    }

    /// Waits until the diary fulfils a condition.
    pub async fn wait_until(&self, what: &str, is_so: impl Fn(&[R::Entry]) -> bool) {
        wait_until(what, async || self.diary.with_entries(|entries| is_so(entries))).await;
    }
}

impl<R: Role> Drop for Process<R> {
    fn drop(&mut self) {
        // The process may be paused, or may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file to which each line is appended with one call, so that a killed process leaves whole lines.
pub struct Diary<E> {
    file: Arc<File>,
    entries: PhantomData<fn(E)>,
}

impl<E> Clone for Diary<E> {
    fn clone(&self) -> Self {
        Self { file: Arc::clone(&self.file), entries: PhantomData }
    }
}

impl<E: Serialize> Diary<E> {
    /// Opens the diary of a role.
    pub fn open(role: &impl Role<Entry = E>) -> Self {
        let file = File::options().append(true).create(true).open(role.diary()).expect("a diary");
        Self { file: Arc::new(file), entries: PhantomData }
    }

    /// Appends a line.
    pub fn write(&self, entry: &E) {
        let line = serde_json::to_string(entry).expect("an entry is JSON") + "\n";
        (&*self.file).write_all(line.as_bytes()).expect("a diary can be written");
    }
}

/// Reads a diary while a process writes it. Each line is read once.
pub struct DiaryReader<E> {
    path: PathBuf,
    read: Mutex<WholeLines<E>>,
}

struct WholeLines<E> {
    entries: Vec<E>,
    bytes: u64,
}

impl<E: DeserializeOwned + Clone> DiaryReader<E> {
    /// A reader of this file, which need not exist yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), read: Mutex::new(WholeLines { entries: Vec::new(), bytes: 0 }) }
    }

    /// The whole lines of the diary; the last line may be incomplete.
    pub fn entries(&self) -> Vec<E> {
        self.with_entries(<[E]>::to_vec)
    }

    /// Looks at the whole lines of the diary.
    pub fn with_entries<T>(&self, look: impl FnOnce(&[E]) -> T) -> T {
        let mut read = lock(&self.read);
        let mut text = String::new();
        if let Ok(mut file) = File::open(&self.path) {
            file.seek(SeekFrom::Start(read.bytes)).expect("a diary can be read");
            file.read_to_string(&mut text).expect("a diary is text");
        }
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        read.entries.extend(whole.lines().map(|line| serde_json::from_str::<E>(line).expect("an entry is JSON")));
        read.bytes += whole.len() as u64;
        look(&read.entries)
    }
}

/// Checks a condition repeatedly until it is true.
pub async fn wait_until(what: &str, is_so: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the stdin of this process ends: the test asks it to end.
pub async fn until_stopped() {
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()).expect("stdin can be read"));
    end.await.expect("stdin ends");
}

/// Milliseconds since 1970, the time of the diaries.
pub fn now_millis() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

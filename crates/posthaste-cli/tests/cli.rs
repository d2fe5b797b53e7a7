//! The commands as a user types them: the real binary, its exit codes and its messages.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::JoinHandle;

use tempfile::TempDir;

const DEFAULT_CONFIG: &str = include_str!("../src/default_config.toml");

/// A temporary folder for the commands of one test, so that they find no configuration or database of another test.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_posthaste"));
        command.current_dir(self.0.path()).args(arguments).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTHASTE_") {
                command.env_remove(name);
            }
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments).output().unwrap())
    }

    fn run_with_input(&self, arguments: &[&str], input: &str) -> Ran {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Ran::of(child.wait_with_output().unwrap())
    }

    fn serve(&self) -> Server {
        let mut command = self.command(&["serve", "--listen", "127.0.0.1:0"]);
        // A request does not time out because the machine is busy.
        command.env("POSTHASTE__DELIVERY__TIMEOUT", "60s").env("POSTHASTE__DLT__TIMEOUT", "60s");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut read = String::new();
        let url = loop {
            let line = stderr.next().unwrap_or_else(|| panic!("the server ended before it was ready: {read}")).unwrap();
            if let Some(url) = line.trim_start().strip_prefix("API ") {
                break url.trim().strip_suffix("/api").expect("the address of the API").to_owned();
            }
            read += &line;
        };
        // Keep reading: a full pipe would block the server.
        let reading = std::thread::spawn(move || stderr.map_while(Result::ok).for_each(drop));
        Server { child, url, _reading: reading }
    }
}

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    #[track_caller]
    fn expect(self, code: i32, message: &str) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        assert!(self.stderr.contains(message), "{}", self.stderr);
        self
    }
}

struct Server {
    child: Child,
    url: String,
    _reading: JoinHandle<()>,
}

impl Server {
    fn terminate(mut self) -> ExitStatus {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads one request, responds with 200, and returns the request as text.
fn take_request(connection: TcpStream) -> String {
    let mut reader = BufReader::new(connection);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        if line == "\r\n" {
            break;
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").unwrap();
    format!("{}\n{}", head.to_ascii_lowercase(), String::from_utf8(body).unwrap())
}

/// Listens on a free port; returns the listener and its address.
fn listen_on_free_port() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

#[test]
fn config_prints_the_commented_default() {
    assert_eq!(Place::new().run(&["config"]).expect(0, "").stdout, DEFAULT_CONFIG);
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let place = Place::new();
    let mut command = place.command(&["config"]);
    let ran = Ran::of(command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap());
    assert_eq!(ran.expect(0, "").stderr, "");
}

#[test]
fn unknown_keys_are_refused_with_a_suggestion() {
    let place = Place::new();
    std::fs::write(place.path("posthaste.toml"), "[outbox]\nbatch_sise = 1\n").unwrap();
    let ran = place.run(&["serve"]).expect(2, "unknown field \"batch_sise\"; did you mean \"batch_size\"?");
    assert!(ran.stderr.contains("posthaste.toml") && ran.stderr.contains("line 2"), "{}", ran.stderr);

    let place = Place::new();
    let output = place.command(&["check"]).env("POSTHASTE__HTTP__LISTN", "x").output().unwrap();
    Ran::of(output).expect(2, "environment variable POSTHASTE__HTTP__LISTN: unknown field \"listn\"; did you mean");
    place.run(&["serve", "--config", "other.toml"]).expect(2, "configuration file other.toml cannot be read");
    place.run(&["serve", "--lisen", "x"]).expect(2, "--listen");
}

#[test]
fn a_variable_with_too_few_underscores_causes_a_warning() {
    let place = Place::new();
    let mut command = place.command(&["check", "--listen", "127.0.0.1:0"]);
    let output = command.env("POSTHASTE_HTTP_LISTEN", "127.0.0.1:1").output().unwrap();
    Ran::of(output).expect(0, "POSTHASTE_HTTP_LISTEN sets nothing: did you mean POSTHASTE__HTTP__LISTEN?");
}

#[test]
fn an_address_other_than_loopback_is_refused() {
    let place = Place::new();
    let ran = place.run(&["serve", "--listen", "0.0.0.0:0"]).expect(2, "this version has no API keys yet");
    assert!(ran.stderr.contains("http.listen (set by --listen)"), "{}", ran.stderr);
    assert_eq!(std::fs::read_dir(place.0.path()).unwrap().count(), 0, "no file was created");
}

#[test]
fn a_port_in_use_fails_the_start_and_creates_no_file() {
    let (_listener, address) = listen_on_free_port();
    let place = Place::new();
    place.run(&["serve", "--listen", &address]).expect(1, &format!("cannot listen on {address}: another program"));
    assert_eq!(std::fs::read_dir(place.0.path()).unwrap().count(), 0, "no file was created");
    place.run(&["check", "--listen", &address]).expect(1, "1 of 7 checks failed");
}

#[test]
fn an_unwritable_database_exits_as_unreachable() {
    let place = Place::new();
    let missing = ["--listen", "127.0.0.1:0", "--database", "sqlite://no/such/folder/p.db"];
    place.run(&[&["serve"], &missing[..]].concat()).expect(3, "check that its folder exists");
    let ran = place.run(&[&["check"], &missing[..]].concat()).expect(3, "");
    assert!(ran.stdout.contains("no/such/folder/p.db cannot be used"), "{}", ran.stdout);

    std::fs::create_dir(place.path("folder.db")).unwrap();
    place
        .run(&["serve", "--listen", "127.0.0.1:0", "--database", "sqlite://folder.db"])
        .expect(3, "folder.db cannot be opened");
}

#[test]
fn a_second_server_on_the_same_database_is_refused() {
    let place = Place::new();
    let server = place.serve();
    place.run(&["serve", "--listen", "127.0.0.1:0"]).expect(1, "database posthaste.db is in use by another posthaste");
    let ran = place.run(&["check", "--listen", "127.0.0.1:0"]).expect(0, "");
    assert!(ran.stdout.contains("one is running on this database"), "{}", ran.stdout);
    assert_eq!(server.terminate().code(), Some(0));
    assert_eq!(place.serve().terminate().code(), Some(0), "the lock is released");
}

fn mode_of(path: &std::path::Path) -> u32 {
    std::fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o777
}

#[test]
fn a_missing_key_file_is_not_replaced_while_credentials_are_sealed() {
    let place = Place::new();
    assert_eq!(place.serve().terminate().code(), Some(0));
    let key = place.path("posthaste.db.key");
    std::fs::remove_file(&key).unwrap();
    // No credentials are sealed yet, so the server may create a new key.
    let server = place.serve();
    let create =
        ["subscriptions", "create", "--event", "a", "--to", "http://127.0.0.1:1/?token=x", "--server", &server.url];
    place.run(&create).expect(0, "");
    assert_eq!(server.terminate().code(), Some(0));
    let kept = std::fs::read(&key).unwrap();
    std::fs::remove_file(&key).unwrap();
    let ran = place.run(&["serve", "--listen", "127.0.0.1:0"]).expect(2, "key file posthaste.db.key is missing");
    assert!(ran.stderr.contains("restore it from a backup"), "{}", ran.stderr);
    assert!(!key.exists(), "no new key was created");
    let ran = place.run(&["check", "--listen", "127.0.0.1:0"]).expect(2, "");
    assert!(ran.stdout.contains("posthaste.db.key is missing"), "{}", ran.stdout);

    std::fs::write(&key, kept).unwrap();
    std::fs::set_permissions(&key, Permissions::from_mode(0o644)).unwrap();
    place.run(&["serve", "--listen", "127.0.0.1:0"]).expect(2, "run `chmod 600 posthaste.db.key`");
    std::fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(place.serve().terminate().code(), Some(0));
}

#[test]
fn the_files_of_a_server_are_accessible_only_to_their_owner() {
    let place = Place::new();
    let _server = place.serve();
    for name in ["posthaste.db", "posthaste.db-wal", "posthaste.db-shm", "posthaste.db.key", "posthaste.db.lock"] {
        assert_eq!(mode_of(&place.path(name)), 0o600, "{name}");
    }
}

#[test]
fn a_newer_schema_is_refused() {
    let place = Place::new();
    assert_eq!(place.serve().terminate().code(), Some(0));
    let newer = "INSERT INTO posthaste_migration SELECT 9999, description, installed_on, success, checksum, \
                 execution_time FROM posthaste_migration LIMIT 1";
    let mut sqlite3 = Command::new("sqlite3");
    assert!(sqlite3.arg(place.path("posthaste.db")).arg(newer).status().unwrap().success());
    let ran = place.run(&["serve", "--listen", "127.0.0.1:0"]).expect(1, "database schema 9999 is newer");
    assert!(ran.stderr.contains("use a newer posthaste"), "{}", ran.stderr);
}

#[test]
fn without_a_server_the_error_suggests_to_start_one() {
    // std cannot bind a port without listening on it. Another program is unlikely to take this port in the meantime.
    let (listener, address) = listen_on_free_port();
    drop(listener);
    let server = format!("http://{address}");
    let publish = ["publish", "--type", "a", "--source", "s", "--payload", "1"];
    let place = Place::new();
    place.run(&[&publish[..], &["--server", &server]].concat()).expect(3, "is `posthaste serve` running?");
    let output = place.command(&publish).env("POSTHASTE__CLIENT__SERVER", &server).output().unwrap();
    Ran::of(output).expect(3, &server);
}

#[test]
fn a_published_event_reaches_every_matching_subscription() {
    let place = Place::new();
    let server = place.serve();
    let run = |arguments: &[&str]| place.run(&[&["--server", &server.url], arguments].concat());
    let (subscriber, address) = listen_on_free_port();
    let endpoint = format!("http://{address}/hook");
    let made = run(&["subscriptions", "create", "--event", "order.placed", "--to", &endpoint, "--output", "json"]);
    let made: serde_json::Value = serde_json::from_str(&made.expect(0, "created definition").stdout).unwrap();
    assert_eq!((&made["endpoint"], &made["subscriberId"]), (&endpoint.into(), &address.into()));

    let payload = r#"{ "id" : 1.0, "id":"ü" }"#;
    let event = ["publish", "--type", "order.placed", "--source", "shop", "--id", "e-1", "--header", "a=b=c"];
    let published = run(&[&event[..], &["--payload", payload]].concat()).expect(0, "");
    assert_eq!(published.stdout, "e-1\n");
    let request = take_request(subscriber.accept().unwrap().0);
    assert!(request.starts_with("post /hook http/1.1") && request.contains("webhook-id: e-1"), "{request}");
    assert!(request.contains("posthaste-header-a: b=c"), "{request}");
    assert!(request.ends_with(&format!("\n{payload}")), "{request}");

    let (first, second) = (r#"{"eventType":"order.placed","sourceService":"shop","payload":[ 1 ]}"#, "not json");
    let ran = place.run_with_input(&["--server", &server.url, "publish", "-"], &format!("{second}\n{first}\n"));
    let ran = ran.expect(1, "line 1: is not JSON");
    assert!(ran.stderr.contains("1 of 2 events were refused"), "{}", ran.stderr);
    assert!(take_request(subscriber.accept().unwrap().0).ends_with("\n[ 1 ]"));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn definitions_and_subscriptions_are_created_changed_and_deleted() {
    let place = Place::new();
    let server = place.serve();
    let run = |arguments: &[&str]| place.run(&[&["--server", &server.url, "--output", "json"], arguments].concat());
    let json = |ran: Ran| serde_json::from_str::<serde_json::Value>(&ran.expect(0, "").stdout).unwrap();
    let definition = json(run(&["definitions", "create", "--event", "a", "--description", "first"]));
    let id = definition["id"].as_str().unwrap();
    let changed = json(run(&["definitions", "update", id, "--source", "shop"]));
    assert_eq!([&changed["eventType"], &changed["sourceService"], &changed["description"]], ["a", "shop", "first"]);
    run(&["definitions", "create", "--event", "a", "--source", "shop"]).expect(1, "");

    std::fs::write(place.path("password"), "s3cret\n").unwrap();
    let auth = ["--basic", "me", "--password-file", "password"];
    let create = ["subscriptions", "create", "--definition", id, "--to", "http://127.0.0.1:1/", "--subscriber", "x"];
    let subscription = json(run(&[&create[..], &auth].concat()));
    let subscription = subscription["id"].as_str().unwrap();
    let changed = json(run(&["subscriptions", "update", subscription, "--active", "false", "--timeout", "2s"]));
    assert_eq!([&changed["subscriberId"], &changed["timeout"], &changed["auth"]["username"]], ["x", "2s", "me"]);
    assert_eq!(changed["active"], false);
    assert!(!changed.to_string().contains("s3cret"));
    assert_eq!(json(run(&["subscriptions", "list", "--subscriber-id", "x"]))["total"], 1);

    run(&["definitions", "delete", id]).expect(1, "");
    run(&["subscriptions", "delete", subscription]).expect(0, "deleted");
    run(&["definitions", "delete", id]).expect(0, "deleted");
    run(&["definitions", "get", id]).expect(4, "");
    run(&["definitions", "get", "nonsense"]).expect(2, "not an id: ids are UUIDs");
    // A refused subscription leaves no definition behind.
    run(&["subscriptions", "create", "--event", "b", "--to", "ftp://h/"]).expect(2, "use https or http");
    run(&["subscriptions", "create", "--event", "b", "--to", "localhost:9000"])
        .expect(2, "start it with https:// or http://");
    assert_eq!(json(run(&["definitions", "list"]))["total"], 0);
}

#[test]
fn dead_letters_are_listed_shown_and_replayed() {
    let place = Place::new();
    std::fs::write(place.path("posthaste.toml"), "[delivery]\nmax_retry = 0\n[dlt]\nmax_retry = 0\n").unwrap();
    let server = place.serve();
    let run = |arguments: &[&str]| place.run(&[&["--server", &server.url], arguments].concat());
    let (subscriber, address) = listen_on_free_port();
    let endpoint = format!("http://{address}/");
    run(&["subscriptions", "create", "--event", "a", "--to", &endpoint, "--subscriber", "x"]).expect(0, "");
    run(&["publish", "--type", "a", "--source", "s", "--payload", "1", "--id", "e-1"]).expect(0, "");
    // A closed connection is a failure that the server notices immediately.
    drop(subscriber.accept().unwrap());
    let list = ["dlt", "list", "--status", "all", "--subscriber-id", "x", "--sort", "-createdAt", "--output", "json"];
    let dead_letter = loop {
        let page: serde_json::Value = serde_json::from_str(&run(&list).expect(0, "").stdout).unwrap();
        if let Some(dead_letter) = page["items"].get(0) {
            break dead_letter["id"].as_str().unwrap().to_owned();
        }
    };
    let shown = run(&["dlt", "show", &dead_letter]).expect(0, "").stdout;
    assert!(shown.contains("e-1") && shown.contains("502"), "{shown}");
    assert_eq!(run(&["dlt", "show", "e-1"]).expect(0, "").stdout, shown, "an event id finds the same dead letter");
    run(&["dlt", "show", "e-2"]).expect(4, "no dead letter with the id e-2");
    run(&["dlt", "show", "no/id"]).expect(2, "is neither the id of a dead letter");
    let taking = std::thread::spawn(move || take_request(subscriber.accept().unwrap().0));
    let replayed = run(&["dlt", "replay", "e-1", "--wait", "10", "--reason", "it is back"]).expect(0, "").stdout;
    assert!(replayed.contains("PROCESSED"), "{replayed}");
    assert!(taking.join().unwrap().ends_with("\n1"));
    run(&["dlt", "list", "--status", "LOST"]).expect(1, "status: ");
    run(&["dlt", "show", "00000000-0000-0000-0000-000000000000"]).expect(4, "");
}

#[test]
fn topics_are_listed_with_their_lag_and_reset() {
    let place = Place::new();
    let server = place.serve();
    let run = |arguments: &[&str]| place.run(&[&["--server", &server.url], arguments].concat());
    let (subscriber, address) = listen_on_free_port();
    run(&["subscriptions", "create", "--event", "a", "--to", &format!("http://{address}/")]).expect(0, "");
    run(&["publish", "--type", "a", "--source", "s", "--payload", "1", "--id", "e-1"]).expect(0, "");
    take_request(subscriber.accept().unwrap().0);
    let list = run(&["topics", "list"]).expect(0, "").stdout;
    assert!(list.lines().any(|line| line.starts_with("posthaste.events.a ")), "{list}");
    let lag = || {
        let lag = ["topics", "lag", "--topic", "posthaste.events.a", "--group", "event-processor", "--output", "json"];
        let lag: serde_json::Value = serde_json::from_str(&run(&lag).expect(0, "").stdout).unwrap();
        lag["items"][0]["partitions"][0]["groups"][0].clone()
    };
    while lag()["lag"] != 0 {}
    assert_eq!((lag()["group"].as_str(), lag()["positionLost"].as_bool()), (Some("event-processor"), Some(false)));
    let reset = ["topics", "reset", "posthaste.events.a", "--to", "earliest", "--group"];
    run(&[&reset[..], &["nobody"]].concat()).expect(4, "the group does not read this partition");
    run(&[&reset[..], &["event-processor"]].concat()).expect(0, "");
    let again = take_request(subscriber.accept().unwrap().0);
    assert!(again.contains("webhook-id: e-1"), "a group that was reset reads again: {again}");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn check_changes_nothing() {
    let place = Place::new();
    let ran = place.run(&["check", "--listen", "127.0.0.1:0", "--output", "json"]).expect(0, "");
    let findings: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert!(findings.as_array().unwrap().iter().all(|finding| finding["ok"] == true), "{findings}");
    assert_eq!(std::fs::read_dir(place.0.path()).unwrap().count(), 0);
}

#[test]
fn the_demo_delivers_every_event_to_every_subscriber() {
    let ran = Place::new().run(&["demo", "--events", "20"]).expect(0, "its dead letters are replayed");
    assert_eq!(ran.stdout.lines().last(), Some("20 of 20 events arrived"));
    assert_eq!(ran.stdout.lines().count(), 6, "{}", ran.stdout);
}

//! The throwaway servers, tested with their own client programs.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use posthaste_backend_tests::servers::{self, CrashableServer, Cutter, Keep, MariaDb, Postgres};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

/// Sends statements to the database of a URL, one after the other on one connection.
async fn run(url: &str, statements: &[&str]) -> Output {
    let mut client;
    if url.starts_with("postgres:") {
        client = Command::new("psql");
        client.args(["-X", "-At", "-q", "-v", "ON_ERROR_STOP=1", "-d", url]);
        client.args(statements.iter().flat_map(|statement| ["-c", statement]));
    } else {
        client = Command::new("mariadb");
        let (server, database) = address(url).split_once('/').unwrap();
        client.args(["--no-defaults", "-N", "-B", "-u", "root", "-h", "127.0.0.1", "--skip-reconnect"]);
        client.args(["-P", server.split_once(':').unwrap().1, "-D", database, "-e", &statements.join(";")]);
    }
    client.output().await.expect("the client program is installed: run ./test")
}

/// The one value that a statement selects.
async fn ask(url: &str, statement: &str) -> String {
    let output = run(url, &[statement]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// `host:port/database`.
fn address(url: &str) -> &str {
    url.split_once('@').unwrap().1
}

async fn refuses(url: &str) -> bool {
    match TcpStream::connect(address(url).split_once('/').unwrap().0).await {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::ConnectionRefused,
    }
}

async fn data_folder(url: &str) -> String {
    let statement = if url.starts_with("postgres:") { "SHOW data_directory" } else { "SELECT @@datadir" };
    ask(url, statement).await
}

#[tokio::test]
async fn every_call_gets_a_postgresql_database_of_its_own() {
    let (first, second) = (servers::postgres().await, servers::postgres().await);
    assert_ne!(first, second);
    ask(&first, "CREATE TABLE here (id int)").await;
    assert_eq!(ask(&second, "SELECT to_regclass('here') IS NULL").await, "t");
}

#[tokio::test]
async fn every_call_gets_a_mariadb_database_of_its_own() {
    let (first, second) = (servers::mariadb().await, servers::mariadb().await);
    assert_ne!(first, second);
    ask(&first, "CREATE TABLE here (id int)").await;
    assert_eq!(ask(&second, "SHOW TABLES").await, "");
    assert_eq!(ask(&second, "SELECT @@character_set_database").await, "utf8mb4");
}

#[tokio::test]
async fn a_postgresql_keeps_its_commits_through_crashes_and_is_removed_when_dropped() {
    keeps_its_commits(Postgres::start().await, Some("SELECT pg_postmaster_start_time()")).await;
}

#[tokio::test]
async fn a_mariadb_keeps_its_commits_through_crashes_and_is_removed_when_dropped() {
    keeps_its_commits(MariaDb::start().await, None).await;
}

/// `up_since` asks when the server was started.
async fn keeps_its_commits(mut server: CrashableServer, up_since: Option<&str>) {
    let url = server.url().to_owned();
    let folder = data_folder(&url).await;
    ask(&url, "CREATE TABLE kept (id int)").await;
    ask(&url, "INSERT INTO kept VALUES (1)").await;
    let started = match up_since {
        Some(up_since) => Some((up_since, ask(&url, up_since).await)),
        None => None,
    };

    server.restart().await;
    assert_eq!(server.url(), url);
    if let Some((up_since, started)) = started {
        assert_ne!(ask(&url, up_since).await, started);
    }
    assert_eq!(ask(&url, "SELECT count(*) FROM kept").await, "1");

    server.stop().await;
    assert!(refuses(&url).await);
    server.stop().await;
    server.start_again().await;
    assert_eq!(ask(&url, "SELECT count(*) FROM kept").await, "1");

    drop(server);
    assert!(refuses(&url).await);
    assert!(!Path::new(&folder).exists());
}

/// The test starts itself as another process, which starts one server of every kind, and kills that process.
#[tokio::test]
async fn the_servers_are_removed_when_the_process_is_killed() {
    const VICTIM: &str = "POSTHASTE_TEST_VICTIM";
    if std::env::var_os(VICTIM).is_some() {
        let (postgres, mariadb) = (Postgres::start().await, MariaDb::start().await);
        for url in [&servers::postgres().await, &servers::mariadb().await, postgres.url(), mariadb.url()] {
            println!("\nstarted {url}");
        }
        // This process also ends if its parent is killed first.
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_servers_are_removed_when_the_process_is_killed", "--nocapture"])
        .env(VICTIM, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let mut servers = Vec::new();
    while servers.len() < 4 {
        let line = lines.next_line().await.unwrap().expect("the victim starts its servers");
        if let Some(url) = line.strip_prefix("started ") {
            servers.push((url.to_owned(), data_folder(url).await));
        }
    }
    victim.kill().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    for (url, folder) in servers {
        while !refuses(&url).await || Path::new(&folder).exists() {
            assert!(Instant::now() < deadline, "{url} is still there with its data in {folder}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Cuts the COMMIT of transactions, and checks what the client sees and what the database has.
async fn check_cut_commits(url: &str) {
    ask(url, "CREATE TABLE events (id int)").await;
    let cutter = Cutter::to(url).await;
    let transaction = ["BEGIN", "INSERT INTO events VALUES (1)", "COMMIT"];

    assert!(run(cutter.url(), &transaction).await.status.success(), "no cut without an armed trap");
    assert_eq!(ask(url, "SELECT count(*) FROM events").await, "1");

    cutter.cut_when_sent(b"COMMIT", Keep::Swallowed);
    let (lost, ()) = tokio::join!(run(cutter.url(), &transaction), cutter.cut());
    assert!(!lost.status.success());
    assert_eq!(ask(url, "SELECT count(*) FROM events").await, "1", "the server never got the commit");

    cutter.cut_when_sent(b"COMMIT", Keep::Forwarded);
    let (unknown, ()) = tokio::join!(run(cutter.url(), &transaction), cutter.cut());
    assert!(!unknown.status.success());
    assert_eq!(ask(url, "SELECT count(*) FROM events").await, "2", "the commit happened, unknown to the client");

    assert!(run(cutter.url(), &transaction).await.status.success(), "a cut happens once");
    assert_eq!(ask(url, "SELECT count(*) FROM events").await, "3");
}

#[tokio::test]
async fn a_commit_to_postgresql_can_be_cut() {
    check_cut_commits(&servers::postgres().await).await;
}

#[tokio::test]
async fn a_commit_to_mariadb_can_be_cut() {
    check_cut_commits(&servers::mariadb().await).await;
}

/// A listener that plays the server, and a proxy to it.
async fn played_server() -> (TcpListener, Cutter) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let cutter = Cutter::to(&format!("played://user:secret@{}/name?x=1", listener.local_addr().unwrap())).await;
    (listener, cutter)
}

/// Both ends of a new connection through the proxy.
async fn connect(listener: &TcpListener, cutter: &Cutter) -> (TcpStream, TcpStream) {
    let proxy = address(cutter.url()).split_once('/').unwrap().0;
    let (client, server) = tokio::join!(TcpStream::connect(proxy), listener.accept());
    (client.unwrap(), server.unwrap().0)
}

async fn send(from: &mut TcpStream, to: &mut TcpStream, data: &[u8]) {
    from.write_all(data).await.unwrap();
    let mut received = vec![0; data.len()];
    to.read_exact(&mut received).await.unwrap();
    assert_eq!(received, data);
}

/// The data that a connection still delivers before it ends.
async fn rest(of: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    // A reset counts as an end.
    let _ = of.read_to_end(&mut rest).await;
    rest
}

#[tokio::test]
async fn the_url_of_a_cutter_differs_in_its_port_alone() {
    let (listener, cutter) = played_server().await;
    let there = listener.local_addr().unwrap().port().to_string();
    let (before, after) = cutter.url().split_once("127.0.0.1:").unwrap();
    let (here, after) = after.split_once('/').unwrap();
    assert_eq!((before, after), ("played://user:secret@", "name?x=1"));
    assert_ne!(here, there);
}

#[tokio::test]
async fn a_cut_closes_one_connection_and_waits_for_the_server() {
    let (listener, cutter) = played_server().await;
    let (mut client, mut server) = connect(&listener, &cutter).await;
    let (mut other_client, mut other_server) = connect(&listener, &cutter).await;
    send(&mut client, &mut server, b"BEGIN").await;
    send(&mut server, &mut client, b"begun").await;

    cutter.cut_when_sent(b"COMMIT", Keep::Forwarded);
    client.write_all(b"<COMMIT>").await.unwrap();
    assert_eq!(rest(&mut server).await, b"<COMMIT>");
    let cut = cutter.cut();
    tokio::pin!(cut);
    assert!(futures_util::poll!(&mut cut).is_pending(), "the server has not answered");
    server.write_all(b"committed").await.unwrap();
    drop(server);
    cut.await;
    assert_eq!(rest(&mut client).await, b"", "the client never gets the answer");

    send(&mut other_client, &mut other_server, b"COMMIT").await;
    send(&mut other_server, &mut other_client, b"committed").await;
}

#[tokio::test]
async fn swallowed_data_never_reaches_the_server() {
    let (listener, cutter) = played_server().await;
    let (mut client, mut server) = connect(&listener, &cutter).await;
    cutter.cut_when_sent(b"COMMIT", Keep::Swallowed);
    client.write_all(b"<COMMIT>").await.unwrap();
    assert_eq!(rest(&mut server).await, b"");
    drop(server);
    cutter.cut().await;
    assert_eq!(rest(&mut client).await, b"");
}

#[tokio::test]
async fn cut_all_closes_every_connection_and_accepts_new_ones() {
    let (listener, cutter) = played_server().await;
    let (mut first, mut first_server) = connect(&listener, &cutter).await;
    let (mut second, mut second_server) = connect(&listener, &cutter).await;
    // The cut of this connection hangs, because its server never closes.
    cutter.cut_when_sent(b"COMMIT", Keep::Forwarded);
    first.write_all(b"COMMIT").await.unwrap();
    assert_eq!(rest(&mut first_server).await, b"COMMIT");

    cutter.cut_all().await;
    cutter.cut().await;
    for end in [&mut first, &mut second, &mut second_server] {
        assert_eq!(rest(end).await, b"");
    }
    let (mut client, mut server) = connect(&listener, &cutter).await;
    send(&mut client, &mut server, b"COMMIT").await;

    drop(cutter);
    assert_eq!(rest(&mut client).await, b"");
    assert_eq!(rest(&mut server).await, b"");
}

#[tokio::test]
async fn a_cutter_forwards_half_closed_connections_and_a_server_that_is_down() {
    let (listener, cutter) = played_server().await;
    let (mut client, mut server) = connect(&listener, &cutter).await;
    client.write_all(b"last words").await.unwrap();
    client.shutdown().await.unwrap();
    assert_eq!(rest(&mut server).await, b"last words");
    send(&mut server, &mut client, b"answer").await;
    drop(server);
    assert_eq!(rest(&mut client).await, b"");

    drop(listener);
    let mut client = TcpStream::connect(address(cutter.url()).split_once('/').unwrap().0).await.unwrap();
    assert_eq!(rest(&mut client).await, b"");
}

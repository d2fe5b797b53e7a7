//! `posthaste migrate`, as an operator uses it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

use posthaste_backend_tests::servers;
use serde_json::Value;

use crate::process::{Backend, Installation, until};
use crate::subscriber::Subscriber;

const UPGRADING: &str = include_str!("../../../../docs/upgrading.md");

/// Runs `posthaste migrate` with these arguments in the folder of the installation, without a key file.
fn migrate(installation: &Installation, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthaste"));
    command.arg("migrate").args(arguments).current_dir(installation.folder.path()).stdin(Stdio::null());
    command.env("POSTHASTE__DATABASE__URL", installation.database_url()).env_remove("POSTHASTE__SECRETS__KEY_FILE");
    command
}

/// The output of a command that must end with this code.
#[track_caller]
fn run(installation: &Installation, arguments: &[&str], code: i32) -> (String, String) {
    let Output { status, stdout, stderr } = migrate(installation, arguments).output().unwrap();
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert_eq!(status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

/// The numbers of the migrations with this status.
fn with_status(installation: &Installation, status: &str) -> Vec<i64> {
    let (list, _) = run(installation, &["list", "--output", "json"], 0);
    let list: Value = serde_json::from_str(&list).unwrap();
    let items = list.as_array().unwrap().iter().filter(|item| item["status"] == status);
    items.map(|item| item["number"].as_i64().unwrap()).collect()
}

async fn the_schema_goes_up_and_down(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let all = with_status(&installation, "PENDING");
    let newest = *all.last().unwrap();
    assert_eq!(all, (1..=newest).collect::<Vec<_>>());
    assert!(!installation.database().exists(), "list changes nothing");
    let (stdout, _) = run(&installation, &["up", "--to", "2"], 0);
    assert!(stdout.contains("log") && stdout.lines().count() == 3, "{stdout}");
    assert_eq!(with_status(&installation, "APPLIED"), [1, 2]);
    let (stdout, stderr) = run(&installation, &["validate"], 1);
    assert!(stdout.contains("migration 3 (") && stderr.contains("run `posthaste migrate up`"), "{stdout}{stderr}");

    run(&installation, &["up"], 0);
    run(&installation, &["up"], 0);
    let (stdout, _) = run(&installation, &["validate", "--output", "json"], 0);
    let valid: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&valid["schema"], &valid["expected"]), (&newest.into(), &newest.into()));
    installation.execute("INSERT INTO outbox_event (event_type, payload) VALUES ('t', '{}')");

    let (stdout, stderr) = run(&installation, &["down", "--to", "0"], 2);
    assert!(stdout.lines().any(|line| line.split_whitespace().eq(["outbox_event", "1"])), "{stdout}");
    assert!(stderr.contains("nothing was changed; add --yes"), "{stderr}");
    assert_eq!(with_status(&installation, "APPLIED"), all);
    let (_, stderr) = run(&installation, &["down", "--to", "99"], 2);
    assert!(stderr.contains(&format!("{newest} is the newest")), "{stderr}");
    let server = installation.start().await;
    if backend == Backend::Sqlite {
        let (_, stderr) = run(&installation, &["down", "--to", "0", "--yes"], 1);
        assert!(stderr.contains("is in use by another posthaste server"), "{stderr}");
    }
    assert!(server.terminate().await.success(), "{}", installation.log());
    installation.execute("DROP TABLE sealing");
    let (stdout, stderr) = run(&installation, &["validate"], 1);
    assert!(stdout.contains("table sealing is missing") && stderr.contains("migrate print"), "{stdout}{stderr}");
    installation.execute("CREATE TABLE sealing (one_row boolean)");

    run(&installation, &["down", "--to", "0", "--yes"], 0);
    assert_eq!(with_status(&installation, "PENDING"), all);
    run(&installation, &["down", "--to", "0", "--yes"], 0);
    let server = installation.start().await;
    assert_eq!(with_status(&installation, "APPLIED"), all);
    assert!(server.terminate().await.success(), "{}", installation.log());
}

async fn a_server_runs_on_a_schema_that_was_printed(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let (up, _) = run(&installation, &["print", "--to", "3"], 0);
    installation.run_script(&up);
    let (up, _) = run(&installation, &["print", "--from", "3"], 0);
    installation.run_script(&up);
    run(&installation, &["validate"], 0);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    assert_eq!(subscriber.wait_for(1).await[0].event_id, id);
    assert!(server.terminate().await.success(), "{}", installation.log());
    let (down, _) = run(&installation, &["print", "--down"], 0);
    installation.run_script(&down);
    assert!(with_status(&installation, "APPLIED").is_empty());
    let (_, stderr) = run(&installation, &["print", "--from", "3", "--to", "2"], 2);
    assert!(stderr.contains("--from must not be above --to"), "{stderr}");
}

async fn a_server_starts_on_a_newer_schema_that_is_compatible(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    run(&installation, &["up"], 0);
    let newest = *with_status(&installation, "APPLIED").last().unwrap();
    let newer = |number: i64, compatible_with: i64| {
        format!(
            "INSERT INTO posthaste_migration (version, description, success, checksum, execution_time)
             SELECT {number}, 'newer (compatible with {compatible_with})', success, checksum, -1
             FROM posthaste_migration WHERE version = 1"
        )
    };
    installation.execute(&newer(newest + 1, newest));
    let server = installation.start().await;
    server.api.publish("order.placed", "1").await;
    assert!(server.terminate().await.success(), "{}", installation.log());
    run(&installation, &["validate"], 0);
    assert_eq!(with_status(&installation, "NEWER"), [newest + 1]);

    installation.execute(&newer(newest + 2, newest + 1));
    let (_, stderr) = run(&installation, &["validate"], 1);
    assert!(stderr.contains("use a newer posthaste"), "{stderr}");
    for command in [["up"].as_slice(), &["down", "--to", "0", "--yes"]] {
        let (_, stderr) = run(&installation, command, 1);
        assert!(stderr.contains("is newer than this program"), "{stderr}");
    }
}

mod on_sqlite {
    use crate::process::Backend;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_schema_goes_up_and_down() {
        super::the_schema_goes_up_and_down(Backend::Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_runs_on_a_schema_that_was_printed() {
        super::a_server_runs_on_a_schema_that_was_printed(Backend::Sqlite).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_starts_on_a_newer_schema_that_is_compatible() {
        super::a_server_starts_on_a_newer_schema_that_is_compatible(Backend::Sqlite).await;
    }
}

mod on_postgres {
    use crate::process::Backend;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_schema_goes_up_and_down() {
        super::the_schema_goes_up_and_down(Backend::Postgres).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_runs_on_a_schema_that_was_printed() {
        super::a_server_runs_on_a_schema_that_was_printed(Backend::Postgres).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_starts_on_a_newer_schema_that_is_compatible() {
        super::a_server_starts_on_a_newer_schema_that_is_compatible(Backend::Postgres).await;
    }
}

/// The statements that the documentation names are all that a server needs.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_needs_no_right_to_create_tables() {
    let owner = Installation::on(Backend::Postgres, &[]).await;
    run(&owner, &["up", "--to", "4"], 0);
    let (_, grants) = UPGRADING.split_once("```sql\n").unwrap();
    owner.run_script(grants.split_once("```").unwrap().0);
    owner.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC");

    let url = owner.database_url().replace("postgres@", "posthaste_server@");
    let mut installation = Installation::new(&[("DLT__RETRY_INTERVAL", "1h")]);
    installation.use_postgres(url);
    let mut serve = Command::new(env!("CARGO_BIN_EXE_posthaste"));
    serve.args(["serve", "--listen", "127.0.0.1:0"]).envs(installation.settings()).stdin(Stdio::null());
    let refused = serve.output().unwrap();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("posthaste migrate") && stderr.contains("permission denied"), "{stderr}");

    run(&owner, &["up"], 0);
    run(&installation, &["validate"], 0);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let id = server.api.publish("order.placed", "1").await;
    assert_eq!(subscriber.wait_for(1).await[0].event_id, id);
    // A dead letter and its replay, so that every table is used.
    let down = Subscriber::down();
    server.api.subscribe("order.lost", "billing", &down.endpoint()).await;
    server.api.publish("order.lost", "2").await;
    let letter = until("the dead letter", async || {
        let page = server.api.get("/api/dlt-messages?status=ALL").await.unwrap().json();
        page["items"].as_array()?.first().map(|letter| letter["id"].clone())
    })
    .await;
    down.come_up().await;
    let replay = serde_json::json!({ "ids": [letter] }).to_string();
    let replayed = server.api.post("/api/replay?wait=30", replay).await.unwrap().json();
    assert_eq!(replayed["results"][0]["status"], "PROCESSED", "{replayed}");
    assert!(server.terminate().await.success(), "{}", installation.log());
    assert!(!installation.log().contains("permission denied"), "{}", installation.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_was_killed_continues_at_the_next_start() {
    let installation = Installation::on(Backend::Postgres, &[]).await;
    run(&installation, &["up", "--to", "2"], 0);
    // The migration can read the history, and not write it.
    let mut psql = Command::new("psql");
    psql.args(["-X", "-q", "-A", "-t", installation.database_url()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut blocker = psql.spawn().unwrap();
    let mut statements = blocker.stdin.take().unwrap();
    writeln!(statements, "BEGIN; LOCK TABLE posthaste_migration IN SHARE MODE; SELECT 'locked';").unwrap();
    let mut answer = String::new();
    BufReader::new(blocker.stdout.take().unwrap()).read_line(&mut answer).unwrap();
    assert_eq!(answer, "locked\n");
    let mut killed = migrate(&installation, &["up"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the migration waits", async || {
        let waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (!installation.execute(waits).is_empty()).then_some(())
    })
    .await;
    killed.kill().unwrap();
    killed.wait().unwrap();
    drop(statements);
    blocker.wait().unwrap();
    assert_eq!(with_status(&installation, "APPLIED"), [1, 2]);
    let server = installation.start().await;
    run(&installation, &["validate"], 0);
    assert!(server.terminate().await.success(), "{}", installation.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_cannot_be_reached_or_named_has_its_own_exit_code() {
    let installation = Installation::new(&[]);
    for command in ["up", "list", "validate"] {
        let (_, stderr) = run(&installation, &[command, "--database", "postgres://me@127.0.0.1:1/hub"], 3);
        assert!(stderr.contains("database postgres://127.0.0.1:1/hub cannot be used"), "{stderr}");
        run(&installation, &[command, "--database", "mysql://me@127.0.0.1/hub"], 2);
    }
    let (_, stderr) = run(&installation, &["validate"], 1);
    assert!(stderr.contains("does not exist: `posthaste migrate up` creates it"), "{stderr}");
    run(&installation, &["down", "--yes"], 2);
    let url = servers::postgres().await;
    let missing = format!("{}/missing", url.rsplit_once('/').unwrap().0);
    let (_, stderr) = run(&installation, &["up", "--database", &missing], 3);
    assert!(stderr.contains("create it"), "{stderr}");
}

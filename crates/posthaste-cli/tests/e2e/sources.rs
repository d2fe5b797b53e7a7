//! Outbox tables in the databases of services.

use std::collections::{BTreeSet, HashMap};
use std::process::{Command, Output};

use posthaste_backend_tests::servers::{self, Cutter};
use serde_json::{Value, json};

use crate::process::{Backend, Installation, items, on_each_backend, until};
use crate::subscriber::Subscriber;

on_each_backend! {
    a_row_in_a_services_own_database_arrives_at_a_subscriber
}

const DOCS: &str = include_str!("../../../../docs/sources.md");

/// The GRANT statements that the documentation has after this line.
fn grants(after: &str) -> String {
    let (_, rest) = DOCS.split_once(after).expect("the line is in the documentation");
    let (_, rest) = rest.split_once("```sql\n").expect("a block of SQL");
    rest.split_once("```").expect("its end").0.to_owned()
}

fn psql(url: &str, statement: &str) -> String {
    printed(Command::new("psql").args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", statement, url]))
}

/// The URL has the form mysql://USER@HOST:PORT/DATABASE.
fn mariadb(url: &str, statement: &str) -> String {
    let url = url::Url::parse(url).expect("a URL");
    let (host, port) = (url.host_str().expect("a host"), url.port().expect("a port").to_string());
    let login = ["--protocol=tcp", "-h", host, "-P", &port, "-u", url.username(), "-N", "-B", "-e", statement];
    let mut program = Command::new("mariadb");
    if let Some(password) = url.password() {
        program.env("MYSQL_PWD", password);
    }
    printed(program.args(login).arg(url.path().trim_start_matches('/')))
}

fn sqlite3(file: &str, statement: &str) -> String {
    printed(Command::new("sqlite3").args(["-cmd", ".timeout 5000", file, statement]))
}

fn printed(command: &mut Command) -> String {
    let ran = command.output().expect("the program is installed: ./test does it");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

/// The same URL for another user.
fn as_user(url: &str, user: &str, password: &str) -> String {
    let mut url = url::Url::parse(url).expect("a URL");
    url.set_username(user).expect("a user");
    url.set_password(Some(password)).expect("a password");
    url.to_string()
}

fn posthaste(installation: &Installation, arguments: &[&str]) -> Output {
    installation.command(arguments).output().expect("posthaste runs")
}

fn succeeds(installation: &Installation, arguments: &[&str]) -> String {
    let ran = posthaste(installation, arguments);
    let (out, error) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{arguments:?}: {out}{error}");
    out.into_owned()
}

/// The exit code and what was printed.
fn fails(installation: &Installation, arguments: &[&str]) -> (i32, String) {
    let ran = posthaste(installation, arguments);
    assert!(!ran.status.success(), "{arguments:?}");
    let printed = String::from_utf8_lossy(&ran.stdout) + String::from_utf8_lossy(&ran.stderr);
    (ran.status.code().expect("an exit code"), printed.into_owned())
}

async fn sources(api: &crate::api::Api) -> HashMap<String, Value> {
    let list = api.get("/api/sources").await.unwrap().json();
    items(&list).iter().map(|item| (item["name"].as_str().expect("a name").to_owned(), item.clone())).collect()
}

/// One source of each database, each with a user that has the documented rights and no others, and one that is away.
async fn a_row_in_a_services_own_database_arrives_at_a_subscriber(backend: Backend) {
    let installation = Installation::on(backend, &[]).await;
    let (shop, stock) = (servers::postgres().await, servers::mariadb().await);
    let crm = installation.folder.path().join("crm.db").display().to_string();
    let roles = [
        format!("CREATE ROLE reader_{} LOGIN PASSWORD 'secret'", installation.port()),
        format!("CREATE USER 'reader_{}'@'%' IDENTIFIED BY 'secret'", installation.port()),
    ];
    let user = format!("reader_{}", installation.port());
    let (shop_reader, stock_reader) = (as_user(&shop, &user, "secret"), as_user(&stock, &user, "secret"));
    installation.write_config(&format!(
        "[[sources]]\nname = 'shop'\nurl = '{shop_reader}'\n\
         [[sources]]\nname = 'stock'\nurl = '{stock_reader}'\n\
         [[sources]]\nname = 'crm'\nurl = 'sqlite://{crm}'\n\
         [[sources]]\nname = 'away'\nurl = 'postgres://nobody@127.0.0.1:1/none'\n"
    ));
    for (name, url) in [("shop", &shop), ("stock", &stock)] {
        succeeds(&installation, &["sources", "migrate", name, "--url", url]);
    }
    let sql = succeeds(&installation, &["sources", "migrate", "crm", "--print"]);
    // The SQL begins with a comment, which the program would take for an option.
    sqlite3(&crm, &format!("\n{sql}"));
    psql(&shop, &roles[0]);
    psql(&shop, &grants("\nPostgreSQL:").replace("posthaste", &user));
    mariadb(&stock, &roles[1]);
    mariadb(&stock, &grants("\nMySQL and MariaDB:").replace("posthaste", &user));

    let (code, found) = fails(&installation, &["sources", "check"]);
    assert_eq!(code, 3, "{found}");
    for line in ["ok     shop", "ok     stock", "ok     crm", "wrong  away", "1 of 4 sources cannot be read"] {
        assert!(found.contains(line), "{line}: {found}");
    }
    assert!(!found.contains("secret"), "{found}");
    assert_eq!(psql(&shop, "SELECT count(*) FROM outbox_event_owner").trim(), "0", "a check records nothing");

    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let insert = |place: &str| {
        format!("INSERT INTO outbox_event (event_type, payload) VALUES ('order.placed', '{{\"place\": \"{place}\"}}')")
    };
    psql(&shop, &insert("shop"));
    mariadb(&stock, &insert("stock"));
    sqlite3(&crm, &insert("crm"));
    let arrivals = subscriber.wait_for(3).await;
    let bodies: BTreeSet<&[u8]> = arrivals.iter().map(|arrival| &arrival.body[..]).collect();
    let expected = ["crm", "shop", "stock"].map(|place| format!("{{\"place\": \"{place}\"}}"));
    assert_eq!(bodies, expected.iter().map(String::as_bytes).collect());

    until("every row is done", async || {
        let found = sources(&server.api).await;
        ["shop", "stock", "crm"].iter().all(|name| found[*name]["pending"] == 0).then_some(())
    })
    .await;
    let found = sources(&server.api).await;
    for name in ["shop", "stock", "crm"] {
        assert_eq!(
            (found[name]["status"].as_str(), &found[name]["lastError"]),
            (Some("up"), &Value::Null),
            "{found:?}"
        );
    }
    assert_eq!(found["away"]["status"], "down");
    let error = found["away"]["lastError"].as_str().expect("an error");
    assert!(error.contains("refused"), "{error}");
    let ready = server.api.get("/readyz").await.unwrap();
    assert_eq!((ready.status, ready.json()["status"].as_str()), (200, Some("degraded")), "{}", ready.text);
    assert!(ready.json()["parts"]["source:away"]["detail"].as_str().is_some_and(|detail| detail.contains("refused")));
    let metrics = server.api.get("/metrics").await.unwrap().text;
    for line in ["posthaste_source_up{source=\"shop\"} 1", "posthaste_source_up{source=\"away\"} 0"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let listed = succeeds(&installation, &["sources", "list"]);
    assert!(listed.contains("away") && listed.contains("down") && !listed.contains("secret"), "{listed}");
    assert!(server.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_comes_back_is_read_again_and_stops_no_other() {
    let installation = Installation::new(&[]);
    let (shop, crm) = (servers::postgres().await, installation.folder.path().join("crm.db").display().to_string());
    let way = Cutter::to(&shop).await;
    sqlite3(&crm, "CREATE TABLE customer (id INTEGER PRIMARY KEY)");
    installation.write_config(&format!(
        "[[sources]]\nname = 'shop'\nurl = '{}'\n[[sources]]\nname = 'crm'\nurl = 'sqlite://{crm}'\n",
        way.url()
    ));
    succeeds(&installation, &["sources", "migrate"]);
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let insert = "INSERT INTO outbox_event (event_type, payload) VALUES ('order.placed', '{}')";
    psql(&shop, insert);
    sqlite3(&crm, insert);
    subscriber.wait_for(2).await;

    way.take_away().await;
    until("the source is down", async || {
        let found = sources(&server.api).await;
        (found["shop"]["status"] == "down" && found["crm"]["status"] == "up").then_some(())
    })
    .await;
    psql(&shop, insert);
    sqlite3(&crm, insert);
    subscriber.wait_for(3).await;
    way.restore();
    subscriber.wait_for(4).await;
    until("the source is up", async || (sources(&server.api).await["shop"]["status"] == "up").then_some(())).await;
    assert_eq!(server.api.get("/readyz").await.unwrap().json()["status"], "ready");
    assert_eq!(subscriber.arrivals().len(), 4, "nothing is delivered twice");
    assert!(server.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_cannot_be_read_is_named_with_the_remedy() {
    let installation = Installation::new(&[]);
    let database = servers::postgres().await;
    let user = format!("nobody_{}", installation.port());
    psql(&database, &format!("CREATE ROLE {user} LOGIN PASSWORD 'secret'"));
    let source = |name: &str, url: &str, more: &str| format!("[[sources]]\nname = '{name}'\nurl = '{url}'\n{more}\n");
    let config = [
        source("absent", &database, "table = 'not_there'"),
        source("old", &database, "table = 'old_outbox'"),
        source("new", &database, "table = 'new_outbox'"),
        source("denied", &as_user(&database, &user, "secret"), "table = 'denied_outbox'"),
        source("stranger", &as_user(&database, "no_such_user", "secret"), ""),
        source("dispatched", &database, "table = 'dispatched_outbox'"),
        source("ordered", &database, "table = 'ordered_outbox'\nmode = 'ordered'"),
        source("file", "sqlite://no/such/file.db", ""),
        source("good", &database, "table = 'good_outbox'"),
    ];
    installation.write_config(&config.join(""));
    for name in ["old", "new", "dispatched", "ordered", "good"] {
        succeeds(&installation, &["sources", "migrate", name]);
    }
    succeeds(&installation, &["sources", "migrate", "denied", "--url", &database]);
    psql(&database, "DELETE FROM old_outbox_migration");
    psql(&database, "UPDATE new_outbox_migration SET version = 999");
    psql(&database, "INSERT INTO dispatched_outbox_owner (reader, mode) VALUES ('dispatcher', 'multi_node')");
    psql(&database, "INSERT INTO ordered_outbox_owner (reader, mode) VALUES ('channels', 'multi_node')");
    psql(&database, "INSERT INTO good_outbox (event_type, payload) VALUES ('order.placed', '{}')");

    let (code, found) = fails(&installation, &["--output", "json", "sources", "check"]);
    assert_eq!(code, 3, "{found}");
    let (json, _) = found.rsplit_once("error:").expect("an error after the list");
    let checked: Vec<Value> = serde_json::from_str(json).expect("a list");
    let found: HashMap<&str, (bool, &str)> = checked
        .iter()
        .map(|item| (item["name"].as_str().unwrap(), (item["ok"] == true, item["found"].as_str().unwrap())))
        .collect();
    for (name, words) in [
        ("absent", &["not_there does not exist", "posthaste sources migrate"][..]),
        ("old", &["old_outbox does not exist, or", "posthaste sources migrate"]),
        ("new", &["schema 999, newer than this program", "use a newer posthaste"]),
        ("denied", &["permission denied", "docs/sources.md"]),
        ("stranger", &["no_such_user"]),
        ("dispatched", &["is read by dispatcher", "another table name"]),
        ("ordered", &["mode multi_node", "mode ordered"]),
        ("file", &["no/such/file.db does not exist"]),
    ] {
        let (ok, text) = found[name];
        assert!(!ok && words.iter().all(|word| text.contains(word)) && !text.contains("secret"), "{name}: {text}");
    }
    assert!(found["good"].0 && found["good"].1.contains("1 events wait"), "{:?}", found["good"]);

    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    psql(&database, "INSERT INTO good_outbox (event_type, payload) VALUES ('order.placed', '{}')");
    subscriber.wait_for(1).await;
    until("the others are down", async || {
        let found = sources(&server.api).await;
        (found.values().filter(|source| source["status"] == "down").count() == 8).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_that_names_one_table_twice_is_refused() {
    let installation = Installation::new(&[]);
    let source = |name: &str, url: &str| format!("[[sources]]\nname = '{name}'\nurl = '{url}'\n");
    for (config, words) in [
        (
            source("a", "postgres://one@host/shop") + &source("b", "postgres://two:secret@host:5432/shop"),
            &["source \"b\"", "source \"a\"", "postgres://host:5432/shop"][..],
        ),
        (source("a", "sqlite://posthaste.db"), &["source \"a\"", "the server itself"]),
        (source("a", "postgres://h/d") + &source("a", "postgres://h/e"), &["\"a\"", "is there twice"]),
        (source("a", "oracle://me:secret@h/d"), &["source \"a\" has a wrong url", "mysql://"]),
        (source("", "postgres://h/d"), &["has a name that is not"]),
        ("[[sources]]\nname = 'a'\n".to_owned(), &["url"]),
        ("[[channels]]\nevent_type = 'a'\ntopic = 'posthaste.outbox.x'\n".to_owned(), &["\"a\"", "bus.topic_prefix"]),
        ("[[channels]]\nevent_type = 'a'\nacks = '1'\n".to_owned(), &["\"a\"", "only Kafka knows"]),
        ("[[channels]]\nevent_type = 'a'\n[[channels]]\nevent_type = 'a'\n".to_owned(), &["\"a\"", "is there twice"]),
    ] {
        installation.write_config(&config);
        std::fs::write(installation.database(), "").unwrap();
        let (code, found) = fails(&installation, &["serve"]);
        assert!(code == 2 && words.iter().all(|word| found.contains(word)), "{code} {found}");
        assert!(!found.contains("secret"), "{found}");
    }
}

/// Services that share a database may have a schema each.
#[tokio::test(flavor = "multi_thread")]
async fn tables_of_different_schemas_are_different_tables() {
    let installation = Installation::new(&[]);
    let source = |name: &str| {
        let url = format!("postgres://127.0.0.1:1/shop?options=-c%20search_path%3D{name}");
        format!("[[sources]]\nname = '{name}'\nurl = '{url}'\n")
    };
    installation.write_config(&(source("one") + &source("two")));
    let (code, found) = fails(&installation, &["sources", "check"]);
    assert!(code == 3 && found.contains("2 of 2 sources cannot be read"), "{code} {found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_reads_no_sources_says_whether_they_can_be_reached() {
    let installation = Installation::new(&[]);
    let file = installation.folder.path().join("crm.db");
    sqlite3(file.to_str().unwrap(), "CREATE TABLE customer (id INTEGER)");
    let source = |name: &str| format!("[[sources]]\nname = '{name}'\nurl = 'sqlite://{name}.db'\n");
    installation.write_config(&(source("crm") + &source("away") + &source("old") + "enabled = false\n"));
    let server = installation.start_roles("ingest,api").await;
    let found = sources(&server.api).await;
    assert_eq!((&found["crm"]["status"], &found["crm"]["lastError"]), (&json!("up"), &Value::Null), "{found:?}");
    assert_eq!((&found["away"]["status"], &found["old"]["status"]), (&json!("down"), &json!("paused")), "{found:?}");
    assert!(found["away"]["lastError"].as_str().unwrap().contains("does not exist"), "{found:?}");
    let metrics = server.api.get("/metrics").await.unwrap().text;
    assert!(!metrics.contains("posthaste_source_up"), "another server measures them: {metrics}");
}

/// Two servers read one source of each database. One of them is killed, the other one paused, while rows are written.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_every_source_arrive_when_servers_are_killed_and_paused() {
    const ROUNDS: usize = 6;
    const ROWS: usize = 100;
    let installation = Installation::on(Backend::Kafka, &[("OUTBOX__LEASE", "3s")]).await;
    let replica = installation.replica();
    let (shop, stock) = (servers::postgres().await, servers::mariadb().await);
    let crm = installation.folder.path().join("crm.db").display().to_string();
    sqlite3(&crm, "CREATE TABLE customer (id INTEGER PRIMARY KEY)");
    let config = format!(
        "[[sources]]\nname = 'shop'\nurl = '{shop}'\n[[sources]]\nname = 'stock'\nurl = '{stock}'\n\
         [[sources]]\nname = 'crm'\nurl = 'sqlite://{crm}'\n"
    );
    installation.write_config(&config);
    replica.write_config(&config);
    succeeds(&installation, &["sources", "migrate"]);
    let (mut one, other) = tokio::join!(installation.start(), replica.start());
    let subscriber = Subscriber::start().await;
    one.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    let mut expected = BTreeSet::new();
    for round in 0..ROUNDS {
        let rows = |place: &str| {
            let ids: Vec<String> = (0..ROWS).map(|row| format!("{place}-{round}-{row}")).collect();
            let values: Vec<String> = ids.iter().map(|id| format!("('{id}', 'order.placed', '{{}}')")).collect();
            let insert =
                format!("INSERT INTO outbox_event (event_id, event_type, payload) VALUES {}", values.join(", "));
            (ids, insert)
        };
        for place in ["shop", "stock", "crm"] {
            let (ids, insert) = rows(place);
            match place {
                "shop" => psql(&shop, &insert),
                "stock" => mariadb(&stock, &insert),
                _ => sqlite3(&crm, &insert),
            };
            expected.extend(ids);
        }
        match round % 3 {
            1 => {
                one.kill();
                one = installation.start().await;
            }
            2 => other.pause_for(std::time::Duration::from_secs(4)).await,
            _ => {}
        }
    }
    subscriber
        .wait_until("every row", |arrivals| {
            let arrived: BTreeSet<&str> = arrivals.iter().map(|arrival| arrival.event_id.as_str()).collect();
            expected.iter().all(|id| arrived.contains(id.as_str()))
        })
        .await;
    until("every row is done", async || {
        let found = sources(&one.api).await;
        found.values().all(|source| source["status"] == "up" && source["pending"] == 0).then_some(())
    })
    .await;
}

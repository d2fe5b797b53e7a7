//! Records that the pipeline cannot read: listed, shown, replayed and discarded; and a look into a topic.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::process::{Installation, Server, items, until};
use crate::subscriber::Subscriber;

const TOPIC: &str = "posthaste.events.order.placed";

/// The clock in milliseconds. An older `sqlite3` cannot evaluate the defaults of the tables.
const NOW: &str = "strftime('%s', 'now') * 1000";

/// Appends a record to the topic, as a program with a fault would.
fn append(installation: &Installation, key: &str, headers: &str, value: &str) {
    installation.run_sqlite3(&format!(
        "BEGIN IMMEDIATE;
         INSERT INTO log_record (partition_id, \"offset\", created_at, key, headers, value)
         SELECT id, next_offset, {NOW}, '{key}', {headers}, {value} FROM log_partition WHERE topic = '{TOPIC}';
         UPDATE log_partition SET next_offset = next_offset + 1 WHERE topic = '{TOPIC}';
         COMMIT"
    ));
}

/// A server whose topic exists, because an event was delivered through it.
async fn start(installation: &Installation) -> (Server, Subscriber) {
    let server = installation.start().await;
    let subscriber = Subscriber::start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;
    server.api.publish("order.placed", "1").await;
    subscriber.wait_for(1).await;
    (server, subscriber)
}

async fn wait_for_records(server: &Server, query: &str, count: usize) -> Value {
    until("the quarantined records", async || {
        let page = server.api.get(&format!("/api/quarantine?{query}")).await.unwrap().json();
        (items(&page).len() == count).then_some(page)
    })
    .await
}

fn id(record: &Value) -> String {
    record["id"].as_str().unwrap().to_owned()
}

/// Runs a command against the server. Returns its exit code, stdout and stderr.
fn run(server: &Server, arguments: &[&str]) -> (i32, String, String) {
    let ran = Command::new(env!("CARGO_BIN_EXE_posthaste"))
        .args(arguments)
        .args(["--server", &format!("http://{}", server.api.address())])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (ran.status.code().unwrap(), text(ran.stdout), text(ran.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_record_is_listed_shown_replayed_and_discarded() {
    let installation = Installation::new(&[]);
    let (server, subscriber) = start(&installation).await;
    append(&installation, "poison", "'[[\"a\",\"b\"]]'", "x'0bad'");
    let page = wait_for_records(&server, "", 1).await;
    let first = items(&page)[0].clone();
    assert_eq!((&first["topic"], &first["group"]), (&json!(TOPIC), &json!("event-processor")));
    assert_eq!((&first["partition"], &first["offset"], &first["size"]), (&json!(0), &json!(1), &json!(2)));
    assert_eq!((&first["status"], &first["replayable"]), (&json!("QUARANTINED"), &json!(true)));
    assert!(first["reason"].as_str().unwrap().starts_with("the value is not framed"), "{first}");
    let detail = server.api.get(&format!("/api/quarantine/{}", id(&first))).await.unwrap().json();
    assert_eq!((&detail["valueBase64"], &detail["headers"]), (&json!("C60="), &json!({ "a": "b" })));
    assert_eq!((&detail["key"], &detail["createdAt"]), (&json!("poison"), &first["createdAt"]));

    // It is published again, is still unreadable, and becomes a new record at its new offset.
    let replay = json!({ "ids": [first["id"]] }).to_string();
    let replayed = server.api.post("/api/quarantine/replay", replay.clone()).await.unwrap();
    assert_eq!(replayed.status, 200, "{}", replayed.text);
    assert_eq!(replayed.json()["results"], json!([{ "id": first["id"], "status": "REPLAYED" }]));
    let second = items(&wait_for_records(&server, "", 1).await)[0].clone();
    assert_eq!((&second["offset"], &second["key"], &second["size"]), (&json!(2), &json!("poison"), &json!(2)));
    let again = server.api.get(&format!("/api/quarantine/{}", id(&second))).await.unwrap().json();
    assert_eq!((&again["valueBase64"], &again["headers"]), (&detail["valueBase64"], &detail["headers"]));
    let again = server.api.post("/api/quarantine/replay", replay).await.unwrap().json();
    assert_eq!(again["results"][0]["detail"], "is replayed already");

    let discard = json!({ "ids": [second["id"]], "reason": "a test" }).to_string();
    let discarded = server.api.post("/api/quarantine/discard", discard).await.unwrap().json();
    assert_eq!(discarded["results"], json!([{ "id": second["id"], "status": "DISCARDED" }]));
    let discarded = wait_for_records(&server, "status=discarded", 1).await;
    assert_eq!(items(&discarded)[0]["statusReason"], "a test");
    assert_eq!(
        items(&wait_for_records(&server, "status=all&topic=posthaste.events.order.placed", 2).await)[0],
        items(&discarded)[0]
    );
    wait_for_records(&server, "", 0).await;

    let metrics = server.api.get("/metrics").await.unwrap().text;
    for line in [
        format!("posthaste_quarantined{{group=\"event-processor\",topic=\"{TOPIC}\"}} 0"),
        "posthaste_quarantined_total{group=\"event-processor\"} 2".to_owned(),
        "posthaste_quarantine_replayed_total{group=\"event-processor\"} 1".to_owned(),
        "posthaste_quarantine_discarded_total{group=\"event-processor\"} 1".to_owned(),
    ] {
        assert!(metrics.lines().any(|metric| metric == line), "{line}: {metrics}");
        let name = line.split('{').next().unwrap();
        assert!(include_str!("../../../../docs/metrics.md").contains(&format!("`{name}`")), "{name}");
    }
    server.api.publish("order.placed", "2").await;
    subscriber.wait_for(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_record_that_can_be_read_is_delivered_and_a_damaged_one_is_not_replayed() {
    let installation = Installation::new(&[]);
    let (server, subscriber) = start(&installation).await;
    // The record of the delivered event once more, as if an older version could not read it.
    installation.run_sqlite3(&format!(
        "BEGIN IMMEDIATE;
         INSERT INTO quarantined_record (id, group_name, topic, partition, \"offset\", key, reason, replayable,
             created_at, updated_at)
         SELECT '0190d0c0-1111-7abc-8def-0123456789ab', 'event-processor', '{TOPIC}', 0, 100, key, 'too new', true,
             {NOW}, {NOW}
         FROM log_record JOIN log_partition ON id = partition_id WHERE topic = '{TOPIC}';
         INSERT INTO quarantined_value (record_id, value)
         SELECT '0190d0c0-1111-7abc-8def-0123456789ab', value
         FROM log_record JOIN log_partition ON id = partition_id WHERE topic = '{TOPIC}';
         COMMIT"
    ));
    append(&installation, "damaged", "'{'", "x'00'");
    wait_for_records(&server, "", 2).await;
    let replay = json!({ "filter": { "group": "event-processor" }, "reason": "updated" }).to_string();
    let replayed = server.api.post("/api/quarantine/replay", replay).await.unwrap().json();
    let results = replayed["results"].as_array().unwrap();
    let of = |status: &str| results.iter().find(|result| result["status"] == status).unwrap();
    assert_eq!((results.len(), of("REPLAYED")["detail"].is_null()), (2, true), "{replayed}");
    assert!(of("QUARANTINED")["detail"].as_str().unwrap().contains("the bus could not read it"), "{replayed}");
    let arrivals = subscriber.wait_for(2).await;
    assert_eq!(arrivals[0].event_id, arrivals[1].event_id);
    let all = json!({ "all": true, "reason": "damaged" }).to_string();
    let discarded = server.api.post("/api/quarantine/discard", all).await.unwrap().json();
    assert_eq!(discarded["results"].as_array().unwrap().len(), 1, "{discarded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_about_the_quarantine_are_checked() {
    let installation = Installation::new(&[]);
    let server = installation.start().await;
    for (path, field) in [
        ("/api/quarantine?grup=a", "grup"),
        ("/api/quarantine?status=LOST", "status"),
        ("/api/quarantine?size=501", "size"),
        ("/api/quarantine?cursor=x", "cursor"),
        ("/api/quarantine?from=yesterday", "from"),
        ("/api/topics/a/records?from=middle", "from"),
        ("/api/topics/a/records?limit=501", "limit"),
    ] {
        let refused = server.api.get(path).await.unwrap();
        assert_eq!((refused.status, &refused.json()["errors"][0]["field"]), (400, &json!(field)), "{path}");
    }
    let some = "0190d0c0-1111-7abc-8def-0123456789ab";
    for (path, body, field) in [
        ("replay", json!({}), "ids"),
        ("replay", json!({ "ids": [] }), "ids"),
        ("replay", json!({ "ids": ["x"] }), "ids[0]"),
        ("replay", json!({ "ids": [some], "all": true }), "ids"),
        ("replay", json!({ "filter": {} }), "filter"),
        ("replay", json!({ "filter": { "topic": "a" }, "all": true }), "all"),
        ("replay", json!({ "filter": { "topc": "a" } }), "filter.topc"),
        ("replay", json!({ "filter": { "from": "now" } }), "filter.from"),
        ("replay", json!({ "all": true, "cursor": "x" }), "cursor"),
        ("discard", json!({ "ids": [some] }), "reason"),
    ] {
        let refused = server.api.post(&format!("/api/quarantine/{path}"), body.to_string()).await.unwrap();
        assert_eq!(
            (refused.status, &refused.json()["errors"][0]["field"]),
            (400, &json!(field)),
            "{body}: {}",
            refused.text
        );
        assert_eq!(refused.json()["errors"].as_array().unwrap().len(), 1, "{body}: {}", refused.text);
    }
    let unknown = json!({ "ids": [some, some] }).to_string();
    let unknown = server.api.post("/api/quarantine/replay", unknown).await.unwrap().json();
    let expected = json!([{ "id": some, "status": null, "detail": "there is no quarantined record with this id" }]);
    assert_eq!(unknown["results"], expected);
    for path in [&format!("/api/quarantine/{some}"), "/api/quarantine/x", "/api/topics/unknown/records"] {
        assert_eq!(server.api.get(path).await.unwrap().status, 404, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_list_show_replay_and_discard() {
    let installation = Installation::new(&[]);
    let (server, _subscriber) = start(&installation).await;
    let (code, stdout, stderr) = run(&server, &["quarantine", "list"]);
    assert!(code == 0 && stderr.contains("nothing is in quarantine"), "{stdout}{stderr}");
    append(&installation, "poison", "NULL", "x'0bad'");
    let first = id(&items(&wait_for_records(&server, "", 1).await)[0]);
    let (code, stdout, stderr) = run(&server, &["quarantine", "list", "--group", "event-processor"]);
    assert!(code == 0 && stdout.contains(&first) && stdout.contains("the value is not framed"), "{stdout}{stderr}");

    let file = installation.folder.path().join("value");
    let (code, stdout, stderr) = run(&server, &["quarantine", "show", &first, "--raw", file.to_str().unwrap()]);
    assert!(code == 0 && stdout.contains("00000000  0b ad") && stdout.contains("poison"), "{stdout}{stderr}");
    assert_eq!(std::fs::read(file).unwrap(), [0x0b, 0xad]);

    let (code, stdout, stderr) = run(&server, &["quarantine", "replay", "--all"]);
    assert!(code == 0 && stdout.contains("REPLAYED"), "{stdout}{stderr}");
    let (code, stdout, stderr) = run(&server, &["quarantine", "replay", &first]);
    assert!(code == 1 && stdout.contains("is replayed already"), "{stdout}{stderr}");
    wait_for_records(&server, "", 1).await;
    let (code, stdout, stderr) =
        run(&server, &["quarantine", "discard", "--topic", TOPIC, "--reason", "a test", "--output", "json"]);
    assert_eq!(code, 0, "{stderr}");
    let discarded: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(discarded["results"][0]["status"], "DISCARDED");

    let unknown = "0190d0c0-1111-7abc-8def-0123456789ab";
    for (arguments, expected) in [
        (&["quarantine", "show", unknown][..], 4),
        (&["quarantine", "replay", unknown], 4),
        (&["quarantine", "show", "x"], 2),
        (&["quarantine", "replay"], 2),
        (&["quarantine", "discard", unknown], 2),
        (&["quarantine", "list", "--status", "lost"], 1),
        (&["topics", "tail", "unknown"], 4),
    ] {
        let (code, _, stderr) = run(&server, arguments);
        assert_eq!(code, expected, "{arguments:?}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_tailed_without_secrets() {
    let installation = Installation::new(&[]);
    let (server, subscriber) = start(&installation).await;
    let payload = "{\n \"n\" : 2.50\n}";
    let event = server.api.publish("order.placed", payload).await;
    subscriber.wait_for(2).await;
    append(&installation, "poison", "NULL", "x'0bad'");
    wait_for_records(&server, "", 1).await;
    let lines =
        |stdout: &str| -> Vec<Value> { stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };

    let (code, stdout, stderr) = run(&server, &["topics", "tail", TOPIC]);
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.contains("{  \"n\" : 2.50 }"), "the payload has its own bytes, on one line: {stdout}");
    let records = lines(&stdout);
    assert_eq!(records.len(), 3, "{stdout}");
    assert_eq!(
        (&records[1]["topic"], &records[1]["partition"], &records[1]["offset"]),
        (&json!(TOPIC), &json!(0), &json!(1))
    );
    assert_eq!((&records[1]["key"], &records[1]["value"]["eventId"]), (&json!(event), &json!(event)));
    assert!(records[1]["schemaId"].is_i64() && records[2]["schemaId"].is_null(), "{stdout}");
    assert_eq!(records[2]["valueBase64"], "C60=");
    assert!(records[2]["error"].as_str().unwrap().starts_with("the value is not framed"), "{stdout}");
    let (_, stdout, _) = run(&server, &["topics", "tail", TOPIC, "--limit", "1"]);
    assert_eq!(lines(&stdout).len(), 1);
    let (code, stdout, _) = run(&server, &["topics", "tail", TOPIC, "--from", "latest"]);
    assert_eq!((code, stdout.as_str()), (0, ""));

    let page = server.api.get(&format!("/api/topics/{TOPIC}/records?limit=2")).await.unwrap().json();
    assert_eq!((items(&page).len(), &page["cursor"]), (2, &json!("0:2")));
    let next = format!("/api/topics/{TOPIC}/records?from={}", page["cursor"].as_str().unwrap());
    assert_eq!(items(&server.api.get(&next).await.unwrap().json())[0]["offset"], 2);

    // An outbox topic has sealed credentials.
    let secret = json!({
        "subscriberId": "secret", "eventKey": { "eventType": "order.placed" },
        "endpoint": format!("{}?token=s3cret", subscriber.endpoint()),
        "auth": { "type": "BASIC_AUTH", "username": "me", "password": "hidden" },
    });
    assert_eq!(server.api.post("/api/subscriptions", secret.to_string()).await.unwrap().status, 201);
    // With --follow it waits for the next records, also before the first of them is published.
    let following = tokio::task::spawn_blocking({
        let address = format!("http://{}", server.api.address());
        move || {
            let follow = ["topics", "tail", TOPIC, "--follow", "--limit", "4", "--server", &address];
            Command::new(env!("CARGO_BIN_EXE_posthaste")).args(follow).output().unwrap()
        }
    });
    server.api.publish("order.placed", "3").await;
    let followed = following.await.unwrap();
    assert_eq!(lines(std::str::from_utf8(&followed.stdout).unwrap()).len(), 4);
    subscriber.wait_for(4).await;
    let topic = "posthaste.outbox.organization";
    installation.run_sqlite3(&format!(
        "UPDATE log_record SET value = value || x'ff' WHERE \"offset\" = 0
             AND partition_id = (SELECT id FROM log_partition WHERE topic = '{topic}')"
    ));
    let (_, stdout, _) = run(&server, &["topics", "tail", topic]);
    let records = lines(&stdout);
    assert_eq!(records.len(), 4, "{stdout}");
    assert!(records[1]["value"]["endpoint"].as_str().unwrap().starts_with("http://"), "{stdout}");
    assert!(
        records[0]["valueBase64"].is_null() && records[0]["error"].as_str().unwrap().contains("sealed"),
        "{stdout}"
    );
    for word in ["s3cret", "hidden", "sealedCredentials", "sealed_credentials"] {
        assert!(!stdout.contains(word), "{word}: {stdout}");
    }
}

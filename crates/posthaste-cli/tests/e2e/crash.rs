use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::api::Api;
use crate::process::Installation;
use crate::subscriber::Subscriber;

/// An event that was sent but not settled before a crash may be delivered again. Settlements are written within 100 ms;
/// the rest is reserve for a busy machine.
const IN_FLIGHT: Duration = Duration::from_millis(1_500);
/// Requests that the killed process sent may still arrive this much later.
const ON_THE_WIRE: Duration = Duration::from_millis(500);
const KILLS: usize = 5;

/// Publishes batches until `stop` is set. Sends a batch without a response again with the same ids, as a client must.
async fn publish(api: Api, writer: usize, stop: Arc<AtomicBool>, accepted_so_far: Arc<AtomicUsize>) -> Vec<String> {
    let mut accepted = Vec::new();
    let mut batch = 0;
    while !stop.load(Ordering::Relaxed) {
        let ids: Vec<_> = (0..20).map(|number| format!("w{writer}-b{batch}-{number}")).collect();
        let events: Vec<_> = ids
            .iter()
            .map(|id| json!({ "eventId": id, "eventType": "order.placed", "sourceService": "e2e", "payload": { "id": id } }))
            .collect();
        let body = json!(events).to_string();
        loop {
            match api.post("/api/events/batch", body.clone()).await {
                Ok(answer) if answer.status == 202 => {
                    let results = answer.json();
                    let stored =
                        results["results"].as_array().unwrap().iter().all(|result| result["eventId"].is_string());
                    assert!(stored, "{results}");
                    break;
                }
                // The server is down or stopping: it is unknown if the batch is stored.
                _ if stop.load(Ordering::Relaxed) => return accepted,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        accepted_so_far.fetch_add(ids.len(), Ordering::Relaxed);
        accepted.extend(ids);
        batch += 1;
    }
    accepted
}

#[tokio::test(flavor = "multi_thread")]
async fn no_accepted_event_is_lost_when_the_server_is_killed_under_load() {
    let installation = Installation::new(&[]);
    let subscriber = Subscriber::start().await;
    let mut server = installation.start().await;
    server.api.subscribe("order.placed", "billing", &subscriber.endpoint()).await;

    let stop = Arc::new(AtomicBool::new(false));
    let accepted_so_far = Arc::new(AtomicUsize::new(0));
    let writers: Vec<_> = (0..4)
        .map(|writer| tokio::spawn(publish(installation.api(), writer, stop.clone(), accepted_so_far.clone())))
        .collect();
    let mut kills = Vec::new();
    for _ in 0..KILLS {
        // Kill the server only after it has accepted and delivered events since the last start.
        let (accepted, arrived) = (accepted_so_far.load(Ordering::Relaxed), subscriber.arrivals().len());
        subscriber.wait_until("work between kills", |arrivals| arrivals.len() >= arrived + 1_000).await;
        while accepted_so_far.load(Ordering::Relaxed) < accepted + 1_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        server.kill();
        kills.push(Instant::now());
        server = installation.start().await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut accepted = Vec::new();
    for writer in writers {
        accepted.extend(writer.await.unwrap());
    }
    let accepted_ids: HashSet<_> = accepted.iter().cloned().collect();
    assert_eq!(accepted_ids.len(), accepted.len());
    subscriber
        .wait_until("every accepted event", |arrivals| {
            arrivals.len() >= accepted_ids.len() && {
                let arrived: HashSet<_> = arrivals.iter().map(|arrival| &arrival.event_id).collect();
                accepted_ids.iter().all(|id| arrived.contains(id))
            }
        })
        .await;
    assert!(server.terminate().await.success(), "{}", installation.log());

    let mut seen: std::collections::HashMap<String, Instant> = std::collections::HashMap::new();
    let mut duplicates = 0;
    for arrival in subscriber.arrivals() {
        if let Some(before) = seen.insert(arrival.event_id.clone(), arrival.at) {
            duplicates += 1;
            // Sent shortly before a kill and not settled yet.
            let excused = kills.iter().any(|kill| before < *kill + ON_THE_WIRE && *kill < before + IN_FLIGHT);
            assert!(
                excused,
                "{} was delivered again although its first delivery was settled long before a kill",
                arrival.event_id
            );
        }
    }
    println!("{} events accepted over {KILLS} kills, {duplicates} duplicates, none lost", accepted_ids.len());
}

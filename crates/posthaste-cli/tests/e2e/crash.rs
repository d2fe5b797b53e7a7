use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::api::Api;
use crate::process::Installation;
use crate::subscriber::Subscriber;

const KILLS: usize = 5;
/// The events that no stage of the pipeline may send again: the outbox row is done, and all records of the event are below
/// the watermarks of their groups. Events that became dead letters are left out, because they are sent later.
pub const SETTLED: &str = "SELECT event_id FROM outbox_event WHERE status = 1
    AND EXISTS (
        SELECT 1 FROM log_record record JOIN log_partition place ON place.id = record.partition_id
        WHERE record.key = event_id AND place.topic LIKE 'posthaste.outbox.%')
    AND NOT EXISTS (
        SELECT 1 FROM log_record record JOIN log_partition place ON place.id = record.partition_id
        LEFT JOIN log_group progress ON progress.partition_id = place.id
        WHERE record.key = event_id
          AND (place.topic LIKE 'posthaste.dlt.%' OR record.\"offset\" >= coalesce(progress.watermark, 0)))";

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
        // A delivery is settled only after its response, so no request of a settled delivery is still on its way.
        let settled: HashSet<_> = installation.run_sqlite3(SETTLED).lines().map(str::to_owned).collect();
        assert!(settled.len() > kills.len() * 500, "{} deliveries are settled", settled.len());
        kills.push((subscriber.arrivals().len(), settled));
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

    let arrivals = subscriber.arrivals();
    for (arrived, settled) in &kills {
        let again = arrivals[*arrived..].iter().find(|arrival| settled.contains(&arrival.event_id));
        assert!(again.is_none(), "{} was delivered again after it was settled", again.unwrap().event_id);
    }
    let duplicates = arrivals.len() - subscriber.counts().len();
    println!("{} events accepted over {KILLS} kills, {duplicates} duplicates, none lost", accepted_ids.len());
}

//! Errors after which a consumer can do nothing any more.

use crate::support::{Cluster, fetch, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_whose_instance_id_another_process_uses_says_so() {
    let cluster = Cluster::start().await;
    let settings = [("group.instance.id", "one")];
    let first = cluster.process_with(&settings);
    cluster.publish(&first, 0..1).await;
    let fenced = cluster.join(&first).await;
    fetch(&*fenced, 1).await;
    let second = cluster.process_with(&settings);
    let consumer = cluster.join(&second).await;
    let error = until("the first consumer fails", || async { fenced.fetch(10).await.err() }).await;
    assert!(error.chain().contains("group.instance.id"), "{}", error.chain());
    fetch(&*consumer, 1).await;
    assert!(fenced.fetch(10).await.is_err(), "it stays an error");
}

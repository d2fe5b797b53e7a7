//! Endpoints that the egress guard denies: refused when they are stored, and never called.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthaste_api::{DeadLetterStatus, EventKey, FieldError, SubscriptionIn};
use posthaste_hub::{DeadLetterFilter, Hub, RegistrationError};
use posthaste_webhook::{EgressGuard, EgressPolicy, Resolve, Resolving};

use crate::support::{
    Subscriber, open, open_with_egress, publish, subscribe, test_settings, try_subscribe, until, with_fast_retries,
};

/// Every name has this address; none if it is absent.
#[derive(Default)]
struct OneAddress(Mutex<Option<SocketAddr>>);

impl OneAddress {
    fn set(&self, address: [u8; 4]) {
        *self.0.lock().unwrap() = Some((address, 0).into());
    }
}

impl Resolve for OneAddress {
    fn resolve(&self, _: &str) -> Resolving {
        let address = *self.0.lock().unwrap();
        Box::pin(async move { address.map(|address| vec![address]).ok_or_else(|| io::ErrorKind::NotFound.into()) })
    }
}

#[track_caller]
fn assert_refused<T>(result: Result<T, RegistrationError>, parts: &[&str]) {
    let Err(RegistrationError::Invalid(errors)) = result else { panic!("it is not refused") };
    let [FieldError { field, detail }] = &errors[..] else { panic!("one field is wrong: {errors:?}") };
    assert_eq!(field, "endpoint");
    for part in parts {
        assert!(detail.contains(part), "{detail}");
    }
}

async fn update(hub: &Hub, id: uuid::Uuid, endpoint: &str) -> Result<(), RegistrationError> {
    let subscription = SubscriptionIn {
        subscriber_id: "orders".to_owned(),
        event_key: Some(EventKey { event_type: "order.placed".to_owned(), ..EventKey::default() }),
        endpoint: endpoint.to_owned(),
        ..SubscriptionIn::default()
    };
    hub.registrations().update_subscription(id, subscription.validate_update().unwrap(), None).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_with_a_denied_address_is_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let resolver = Arc::new(OneAddress::default());
    let guard = EgressGuard::with_resolver(EgressPolicy::default(), resolver.clone());
    let hub = open_with_egress(folder.path(), guard, test_settings()).await;
    let create = async |endpoint: &str| try_subscribe(&hub, "order.placed", "orders", endpoint, None).await;

    let metadata = create("http://2852039166/latest/meta-data").await;
    assert_refused(metadata, &["169.254.169.254", "169.254.0.0/16 (link-local, RFC 3927)", "egress.allow"]);
    assert_refused(create("http://[::1]:9000/hook").await, &["::1/128 (loopback, RFC 4291)"]);
    resolver.set([10, 0, 0, 5]);
    let named = create("https://intranet.example/hook").await;
    assert_refused(named, &["\"intranet.example\"", "10.0.0.5", "10.0.0.0/8 (private use, RFC 1918)", "egress.allow"]);

    *resolver.0.lock().unwrap() = None;
    let id = create("https://later.example/hook").await.expect("a name without addresses may have some later");
    assert_refused(update(&hub, id, "http://192.168.1.1/hook").await, &["192.168.0.0/16"]);
    resolver.set([8, 8, 8, 8]);
    update(&hub, id, "https://later.example/other").await.expect("the address is public");
    let stored = hub.registrations().subscription(id).await.unwrap();
    assert_eq!(stored.value.endpoint, "https://later.example/other");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_endpoint_that_is_denied_now_is_never_called_until_an_operator_allows_it() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let endpoint = format!("http://{}/hook?token=s3cret", subscriber.start().await);
    let hub = open(folder.path(), test_settings()).await;
    subscribe(&hub, "order.placed", "orders", &endpoint, None).await;
    hub.stop().await;

    let mut settings = with_fast_retries();
    settings.dlt.retry_interval = Duration::from_millis(1);
    let hub = open_with_egress(folder.path(), EgressGuard::default(), settings).await;
    let id = publish(&hub, r#"{"eventType":"order.placed","sourceService":"shop","payload":{"n":1}}"#).await;
    let failed =
        DeadLetterFilter { status: Some(posthaste_hub::DeadLetterStatus::Failed), ..DeadLetterFilter::default() };
    let letter = until("the delivery is a dead letter", async || {
        hub.dead_letters(&failed).await.unwrap().items.into_iter().next()
    })
    .await;
    assert_eq!((letter.message_id.as_str(), letter.error_code.as_deref()), (id.as_str(), Some("egress_denied")));
    let detail = hub.dead_letter(letter.id).await.unwrap().unwrap();
    let failure = detail.failure.unwrap();
    assert_eq!(failure.attempts, 1, "it is not retried");
    let cause = failure.cause.unwrap();
    assert!(cause.contains("127.0.0.0/8 (loopback, RFC 1122)") && cause.contains("egress.allow"), "{cause}");
    assert!(!cause.contains("s3cret") && !failure.message.contains("s3cret"), "{cause}");
    let replayed = hub.replay(&[letter.id], None, Some(Duration::from_secs(60))).await.unwrap();
    let result = replayed.results.unwrap().remove(0);
    assert_eq!((result.status, result.error_code.as_deref()), (DeadLetterStatus::Failed, Some("egress_denied")));
    let detail = hub.dead_letter(letter.id).await.unwrap().unwrap();
    assert_eq!((detail.letter.retry_count, detail.history.len()), (0, 1), "only the replay was tried");
    hub.stop().await;
    assert!(subscriber.received().is_empty());

    let hub = open(folder.path(), test_settings()).await;
    let replayed = hub.replay(&[letter.id], None, Some(Duration::from_secs(60))).await.unwrap();
    assert_eq!(replayed.results.unwrap()[0].status, DeadLetterStatus::Processed);
    assert_eq!(subscriber.received().len(), 1);
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_changes_its_address_after_the_save_is_never_called() {
    let folder = tempfile::tempdir().unwrap();
    let subscriber = Subscriber::default();
    let port = subscriber.start().await.port();
    let resolver = Arc::new(OneAddress::default());
    resolver.set([8, 8, 8, 8]);
    let guard = EgressGuard::with_resolver(EgressPolicy::default(), resolver.clone());
    let hub = open_with_egress(folder.path(), guard, test_settings()).await;
    subscribe(&hub, "order.placed", "orders", &format!("http://rebinding.example:{port}/hook"), None).await;
    resolver.set([127, 0, 0, 1]);
    publish(&hub, r#"{"eventType":"order.placed","sourceService":"shop","payload":null}"#).await;
    let letter = until("the delivery is a dead letter", async || {
        hub.dead_letters(&DeadLetterFilter::default()).await.unwrap().items.into_iter().next()
    })
    .await;
    assert_eq!(letter.error_code.as_deref(), Some("egress_denied"));
    hub.stop().await;
    assert!(subscriber.received().is_empty());
}

//! Our client with Apicurio Registry and with the built-in registry: the same functions.

use posthaste_schema::compatibility::Level;
use posthaste_schema::{RegistryError, SchemaReference, SchemaRegistry, SchemaText};

use crate::support::{Registry, events, text};

macro_rules! on_both_registries {
    ($($name:ident)*) => {
        mod apicurio {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(super::Registry::apicurio().await).await;
                }
            )*
        }
        mod builtin {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    super::$name(super::Registry::builtin().await).await;
                }
            )*
        }
    };
}

on_both_registries!(
    the_same_schema_gets_the_same_id
    an_unknown_id_is_no_schema
    an_incompatible_schema_is_refused
    references_and_well_known_types_are_resolved
    bad_schemas_are_refused
    many_clients_register_one_schema_at_once
);

async fn the_same_schema_gets_the_same_id(registry: Registry) {
    let subject = registry.subject("orders-value");
    let id = registry.client().register(&subject, &events()).await.unwrap();
    assert!(id > 0);
    // Another client has nothing in its cache.
    assert_eq!(registry.client().register(&subject, &events()).await.unwrap(), id);
    assert_eq!(registry.client().register(&registry.subject("payments-value"), &events()).await.unwrap(), id);
    let schema = registry.client().schema(id).await.unwrap().unwrap();
    assert_eq!(schema.message_name(&[0]), Some("posthaste.v1.EventHubEvent"));
    assert_eq!(&schema.position("posthaste.v1.OutboxEvent").unwrap()[..], [2]);
    let other = registry.client().register(&registry.subject("other"), &text("message Other {}")).await.unwrap();
    assert_ne!(other, id);
    registry.client().check().await.unwrap();
}

async fn an_unknown_id_is_no_schema(registry: Registry) {
    assert!(registry.client().schema(1_999_999_999).await.unwrap().is_none());
}

async fn an_incompatible_schema_is_refused(registry: Registry) {
    let (client, subject) = (registry.client(), registry.subject("changing/ü-value"));
    client.register(&subject, &text("message A { string a = 1; }")).await.unwrap();
    client.set_compatibility(&subject, Level::Backward).await.unwrap();
    let incompatible = text("message A { int32 a = 1; }");
    assert!(!client.is_compatible(&subject, &incompatible).await.unwrap());
    let error = client.register(&subject, &incompatible).await.unwrap_err();
    assert!(matches!(error, RegistryError::Incompatible { .. }), "{error:?}");
    let compatible = text("message A { string a = 1; int32 b = 2; }");
    assert!(client.is_compatible(&subject, &compatible).await.unwrap());
    client.register(&subject, &compatible).await.unwrap();
    assert!(client.is_compatible(&registry.subject("new"), &compatible).await.unwrap());
    client.set_compatibility(&subject, Level::None).await.unwrap();
    client.register(&subject, &incompatible).await.unwrap();
}

async fn references_and_well_known_types_are_resolved(registry: Registry) {
    let (client, money) = (registry.client(), registry.subject("money"));
    client.register(&money, &text("package shop; message Money { int64 cents = 1; }")).await.unwrap();
    let reference = SchemaReference { name: "shop/money.proto".to_owned(), subject: money, version: 1 };
    let order = text(
        "import \"shop/money.proto\"; import \"google/protobuf/timestamp.proto\";
         message Order { shop.Money total = 1; google.protobuf.Timestamp at = 2; }",
    );
    let order = SchemaText { references: vec![reference], ..order };
    let id = client.register(&registry.subject("order-value"), &order).await.unwrap();
    let schema = registry.client().schema(id).await.unwrap().unwrap();
    assert_eq!(schema.message_name(&[0]), Some("Order"));
    assert_eq!(schema.text().references, order.references);
    assert_eq!(schema.files().count(), 2);
}

async fn bad_schemas_are_refused(registry: Registry) {
    let client = registry.client();
    let error = client.register(&registry.subject("bad"), &text("message A {")).await.unwrap_err();
    assert!(matches!(error, RegistryError::Refused { .. }), "{error:?}");
}

async fn many_clients_register_one_schema_at_once(registry: Registry) {
    let subject = registry.subject("hurry-value");
    let schema = text("package hurry; message A { string a = 1; }");
    let clients = (0..10).map(|_| {
        let (client, subject, schema) = (registry.client(), subject.clone(), schema.clone());
        tokio::spawn(async move { client.register(&subject, &schema).await })
    });
    let mut ids = Vec::new();
    for client in clients.collect::<Vec<_>>() {
        ids.push(client.await.unwrap().unwrap());
    }
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
}

//! Programs of different releases read each other's messages, so the Protobuf contract stays compatible.

use posthaste_schema::compatibility::Level;
use posthaste_schema::{Imports, ParsedSchema, SchemaReference, SchemaText};

const EVENTS: &str = "posthaste/v1/events.proto";

/// A file of the contract: today's text, and that of the last release.
struct Contract {
    today: &'static str,
    released: &'static str,
}

macro_rules! contract {
    ($file:literal) => {
        Contract {
            today: include_str!(concat!("../proto/posthaste/v1/", $file)),
            released: include_str!(concat!("../released/posthaste/v1/", $file)),
        }
    };
}

const CONTRACTS: [Contract; 3] =
    [contract!("events.proto"), contract!("event_hub.proto"), contract!("subscriptions.proto")];

/// `events` is the text of the file that the others import.
fn parse(text: &str, events: &str) -> ParsedSchema {
    let (mut references, mut imports) = (Vec::new(), Imports::new());
    if text.contains(EVENTS) {
        references.push(SchemaReference { name: EVENTS.to_owned(), subject: "events".to_owned(), version: 1 });
        imports.insert(EVENTS.to_owned(), events.to_owned());
    }
    ParsedSchema::parse(SchemaText { text: text.to_owned(), references }, &imports).unwrap()
}

fn findings(today: &ParsedSchema, released: &ParsedSchema) -> Vec<String> {
    Level::Full.check(today, [released].into_iter()).iter().map(ToString::to_string).collect()
}

/// At a release, after this test has passed, copy `proto` over `released`: `cp -r proto/. released/`. Never do so to make
/// the test pass. Add a field with a new number instead of changing one.
#[test]
fn the_contract_is_compatible_with_the_last_release_in_both_directions() {
    let [Contract { today, released }, ..] = CONTRACTS;
    for contract in CONTRACTS {
        let findings = findings(&parse(contract.today, today), &parse(contract.released, released));
        assert!(findings.is_empty(), "incompatible with the last release:\n{}", findings.join("\n"));
    }
}

#[test]
fn an_incompatible_change_of_the_contract_would_be_found() {
    for (contract, from, to) in [
        (&CONTRACTS[0], "string event_id = 1;", "uint64 event_id = 1;"),
        (&CONTRACTS[1], "string source_service = 3;", "uint64 source_service = 3;"),
    ] {
        let changed = contract.today.replace(from, to);
        let events = CONTRACTS[0].released;
        let findings = findings(&parse(&changed, events), &parse(contract.released, events));
        assert_eq!(findings.len(), 2, "once for each direction: {findings:?}");
    }
}

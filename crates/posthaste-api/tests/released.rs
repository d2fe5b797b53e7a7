//! Programs of different releases read each other's records, so the Protobuf contract stays compatible.

use posthaste_schema::compatibility::Level;
use posthaste_schema::{Imports, ParsedSchema, SchemaText};

const TODAY: &str = include_str!("../proto/posthaste/v1/events.proto");
/// The file of the last release.
const RELEASED: &str = include_str!("../released/posthaste/v1/events.proto");

fn parse(text: &str) -> ParsedSchema {
    ParsedSchema::parse(SchemaText { text: text.to_owned(), references: Vec::new() }, &Imports::new()).unwrap()
}

/// At a release, after this test has passed, copy `proto` over `released`: `cp -r proto/. released/`. Never do so to make
/// the test pass. Add a field with a new number instead of changing one.
#[test]
fn the_contract_is_compatible_with_the_last_release_in_both_directions() {
    let findings = Level::Full.check(&parse(TODAY), [&parse(RELEASED)].into_iter());
    let findings: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "incompatible with the last release:\n{}", findings.join("\n"));
}

#[test]
fn an_incompatible_change_of_the_contract_would_be_found() {
    let changed = TODAY.replace("string event_id = 1;", "uint64 event_id = 1;");
    let findings = Level::Full.check(&parse(&changed), [&parse(RELEASED)].into_iter());
    assert_eq!(findings.len(), 2, "once for each direction: {findings:?}");
}

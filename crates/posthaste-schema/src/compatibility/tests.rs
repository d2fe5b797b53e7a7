use posthaste_core::hub_store::SchemaText;

use super::Rule::*;
use super::*;
use crate::schema::Imports;

fn schema(text: &str) -> ParsedSchema {
    let syntax = if text.contains("syntax") { "" } else { "syntax = \"proto3\"; " };
    let text = SchemaText { text: format!("{syntax}{text}"), references: Vec::new() };
    ParsedSchema::parse(text, &Imports::new()).unwrap()
}

fn rules(reader: &str, writer: &str) -> Vec<Rule> {
    findings_of_reader(&schema(reader), &schema(writer)).iter().map(|finding| finding.rule).collect()
}

/// What it is about, two schemas, and the findings of a reader with the second and of a reader with the first.
type Case = (&'static str, String, String, &'static [Rule], &'static [Rule]);

/// Every rule, with the findings of a reader with the second schema, and of a reader with the first.
#[test]
fn every_rule_in_both_directions() {
    const SAME: &[Rule] = &[];
    let required = |fields: &str| format!("syntax = \"proto2\"; message A {{ {fields} }}");
    let cases: Vec<Case> = vec![
        ("the same", "message A { int32 a = 1; }".into(), "message A { int32 a = 1; }".into(), SAME, SAME),
        ("field added", "message A {}".into(), "message A { int32 a = 1; }".into(), SAME, SAME),
        ("field renamed", "message A { int32 a = 1; }".into(), "message A { int32 b = 1; }".into(), SAME, SAME),
        ("message added", "message A {}".into(), "message A {} message B {}".into(), SAME, &[MessageRemoved]),
        ("messages reordered", "message A {} message B {}".into(), "message B {} message A {}".into(), SAME, SAME),
        ("nested message added", "message A {}".into(), "message A { message B {} }".into(), SAME, &[MessageRemoved]),
        (
            "package",
            "package a; message A {}".into(),
            "package b; message A {}".into(),
            &[PackageChanged],
            &[PackageChanged],
        ),
        ("enum added", "message A {}".into(), "message A {} enum E { ZERO = 0; }".into(), SAME, SAME),
        (
            "enum constant added and renamed",
            "message A { enum E { ZERO = 0; } E e = 1; }".into(),
            "message A { enum E { NULL = 0; ONE = 1; } E e = 1; }".into(),
            SAME,
            SAME,
        ),
        (
            "enum and number",
            "message A { enum E { ZERO = 0; } E e = 1; }".into(),
            "message A { enum E { ZERO = 0; } int64 e = 1; }".into(),
            SAME,
            SAME,
        ),
        (
            "field of a nested message",
            "message A { message B { int32 a = 1; } }".into(),
            "message A { message B { string a = 1; } }".into(),
            &[FieldScalarKindChanged],
            &[FieldScalarKindChanged],
        ),
        (
            "message and scalar",
            "message B {} message A { B a = 1; }".into(),
            "message B {} message A { bytes a = 1; }".into(),
            &[FieldKindChanged],
            &[FieldKindChanged],
        ),
        (
            "map and message",
            "message B {} message A { map<string, string> a = 1; }".into(),
            "message B {} message A { repeated B a = 1; }".into(),
            &[FieldKindChanged],
            &[FieldKindChanged],
        ),
        (
            "map key and value",
            "message A { map<string, string> a = 1; }".into(),
            "message A { map<int32, double> a = 1; }".into(),
            &[FieldScalarKindChanged, FieldScalarKindChanged],
            &[FieldScalarKindChanged, FieldScalarKindChanged],
        ),
        (
            "map value in its group",
            "message A { map<string, string> a = 1; }".into(),
            "message A { map<string, bytes> a = 1; }".into(),
            SAME,
            SAME,
        ),
        (
            "another message type",
            "message B {} message C {} message A { B a = 1; }".into(),
            "message B {} message C {} message A { C a = 1; }".into(),
            &[FieldNamedTypeChanged],
            &[FieldNamedTypeChanged],
        ),
        (
            "number in a list",
            "message A { int32 a = 1; }".into(),
            "message A { repeated int32 a = 1; }".into(),
            &[FieldNumericLabelChanged],
            &[FieldNumericLabelChanged],
        ),
        (
            "text in a list",
            "message A { string a = 1; }".into(),
            "message A { repeated bytes a = 1; }".into(),
            SAME,
            SAME,
        ),
        (
            "explicit presence",
            "message A { int32 a = 1; int32 b = 2; }".into(),
            "message A { optional int32 a = 1; optional int32 b = 2; }".into(),
            SAME,
            SAME,
        ),
        (
            "required field",
            required(""),
            required("required int32 a = 1;"),
            &[RequiredFieldAdded],
            &[RequiredFieldRemoved],
        ),
        (
            "required number",
            required("optional int32 a = 1;"),
            required("required int32 a = 1;"),
            &[FieldNumericLabelChanged],
            &[FieldNumericLabelChanged],
        ),
        (
            "field of a oneof added",
            "message A { oneof o { int32 a = 1; } }".into(),
            "message A { oneof o { int32 a = 1; int32 b = 2; } }".into(),
            SAME,
            &[OneofFieldRemoved],
        ),
        (
            "oneof added",
            "message A {}".into(),
            "message A { oneof o { int32 a = 1; int32 b = 2; } }".into(),
            SAME,
            SAME,
        ),
        (
            "one field into a new oneof",
            "message A { int32 a = 1; }".into(),
            "message A { oneof o { int32 a = 1; int32 b = 2; } }".into(),
            SAME,
            SAME,
        ),
        (
            "two fields into a oneof",
            "message A { int32 a = 1; int32 b = 2; }".into(),
            "message A { oneof o { int32 a = 1; int32 b = 2; } }".into(),
            &[MultipleFieldsMovedToOneof],
            SAME,
        ),
        (
            "a field into an existing oneof",
            "message A { int32 a = 1; oneof o { int32 b = 2; } }".into(),
            "message A { oneof o { int32 a = 1; int32 b = 2; } }".into(),
            &[FieldMovedToExistingOneof],
            SAME,
        ),
        (
            "type of a field that moves into a oneof",
            "message A { int32 a = 1; }".into(),
            "message A { oneof o { string a = 1; } }".into(),
            &[FieldScalarKindChanged],
            &[FieldScalarKindChanged],
        ),
        (
            "a recursive message",
            "message A { A next = 1; int32 a = 2; }".into(),
            "message A { A next = 1; string a = 2; }".into(),
            &[FieldScalarKindChanged],
            &[FieldScalarKindChanged],
        ),
    ];
    for (what, first, second, of_second, of_first) in cases {
        assert_eq!(rules(&second, &first), of_second, "{what}: a reader with the second schema");
        assert_eq!(rules(&first, &second), of_first, "{what}: a reader with the first schema");
    }
}

#[test]
fn scalar_types_can_be_exchanged_within_their_group() {
    let groups: [&[&str]; 7] = [
        &["int32", "int64", "uint32", "uint64", "bool"],
        &["sint32", "sint64"],
        &["string", "bytes"],
        &["fixed32", "sfixed32"],
        &["fixed64", "sfixed64"],
        &["float"],
        &["double"],
    ];
    let scalars = groups.iter().enumerate().flat_map(|(group, names)| names.iter().map(move |name| (group, *name)));
    let scalars: Vec<(usize, &str)> = scalars.collect();
    for (group, name) in &scalars {
        for (other_group, other) in &scalars {
            let text = |name: &str| format!("message A {{ {name} a = 1; }}");
            let expected: &[Rule] = if group == other_group { &[] } else { &[FieldScalarKindChanged] };
            assert_eq!(rules(&text(name), &text(other)), expected, "{name} and {other}");
        }
    }
}

#[test]
fn findings_name_message_and_field() {
    let finding = |reader: &str, writer: &str| findings_of_reader(&schema(reader), &schema(writer))[0].to_string();
    assert_eq!(
        finding(
            "package p; message A { message B { string a = 7; } }",
            "package p; message A { message B { int32 a = 7; } }"
        ),
        "FIELD_SCALAR_KIND_CHANGED: field A.B.a (7) has type string and had int32"
    );
    assert_eq!(finding("message A {}", "message A {} message B {}"), "MESSAGE_REMOVED: message B is missing");
    assert_eq!(
        finding("message A { repeated int32 a = 1; }", "message A { int32 a = 1; }"),
        "FIELD_NUMERIC_LABEL_CHANGED: field A.a (1) is repeated and was a single value"
    );
}

/// The type of a field may be imported, from another version of the imported schema.
#[test]
fn imported_types_are_compared() {
    let importing = |field: &str, package: &str| {
        let import = format!("syntax = \"proto3\"; package {package}; message Money {{ {field} cents = 1; }}");
        let text =
            format!("syntax = \"proto3\"; import \"money.proto\"; message Order {{ {package}.Money total = 1; }}");
        let imports = Imports::from([("money.proto".to_owned(), import)]);
        ParsedSchema::parse(SchemaText { text, references: Vec::new() }, &imports).unwrap()
    };
    let rules = |reader: &ParsedSchema, writer: &ParsedSchema| {
        findings_of_reader(reader, writer).iter().map(|finding| finding.rule).collect::<Vec<_>>()
    };
    let old = importing("int32", "shop");
    assert_eq!(rules(&importing("int64", "shop"), &old), []);
    assert_eq!(rules(&importing("string", "shop"), &old), [FieldScalarKindChanged]);
    assert_eq!(rules(&importing("int64", "bank"), &old), [], "only the package of the import changed");
}

#[test]
fn levels_say_which_versions_and_directions_count() {
    let versions = ["message A { int32 a = 1; }", "message A { string a = 1; }", "message A {}"].map(schema);
    // Can be read by the last version, which has no field 1, but not by the first.
    let new = schema("message A { string a = 1; } message B {}");
    let passes = |level: Level| level.check(&new, versions.iter()).is_empty();
    assert!(passes(Level::None) && passes(Level::Backward));
    assert!(!passes(Level::BackwardTransitive) && !passes(Level::ForwardTransitive) && !passes(Level::FullTransitive));
    // The last version lacks message B.
    assert!(!passes(Level::Forward) && !passes(Level::Full));
    for level in Level::ALL {
        assert_eq!(level.as_str().parse(), Ok(level));
        assert!(level.check(&new, [].into_iter()).is_empty(), "a first version is always compatible");
    }
    assert_eq!("backward".parse(), Ok(Level::Backward));
    assert!("BACKWARDS".parse::<Level>().unwrap_err().to_string().contains("BACKWARD_TRANSITIVE"));
}

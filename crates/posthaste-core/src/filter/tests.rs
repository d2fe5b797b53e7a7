use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn condition(path: &str, op: FilterOp, value: Option<&str>) -> Condition {
    let written = FilterCondition { path: path.to_owned(), op, value: value.map(JsonText::new) };
    Condition::new(written).unwrap_or_else(|errors| panic!("{path} {} {value:?}: {errors:?}", op.name()))
}

fn holds(payload: &str, path: &str, op: FilterOp, value: Option<&str>) -> bool {
    let payload = Json::parse(payload.as_bytes()).unwrap_or_else(|| panic!("{payload} is not JSON"));
    condition(path, op, value).holds(&payload)
}

fn hash_of(json: &Json<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    json.hash(&mut hasher);
    hasher.finish()
}

fn is_equal(one: &str, other: &str) -> bool {
    let (one, other) = (Json::parse(one.as_bytes()).unwrap(), Json::parse(other.as_bytes()).unwrap());
    assert!(one != other || hash_of(&one) == hash_of(&other), "equal values have equal hashes");
    one == other
}

#[test]
fn numbers_compare_by_value() {
    for same in [
        &["100", "100.0", "1e2", "1E+2", "10e1", "1000e-1", "0.1e3", "100.000"][..],
        &["0", "-0", "0.0", "0e5", "-0.00e-7"],
        &["0.1", "1e-1", "0.10", "10e-2", "0.01e1"],
        &["-25", "-2.5e1", "-25.0"],
        &["18446744073709551617", "18446744073709551617.0", "1844674407370955161.7e1"],
        &["1e400", "10e399", "0.1e401"],
        &["1200", "12e2", "1.2e3", "0.0012e6"],
    ] {
        for one in same {
            same.iter().for_each(|other| assert!(is_equal(one, other), "{one} {other}"));
        }
    }
    for (one, other) in [
        ("100", "-100"),
        ("100", "1000"),
        ("0", "1"),
        ("18446744073709551617", "18446744073709551616"),
        ("0.1", "0.10000000000000000001"),
        ("1e400", "1e401"),
        ("1e400", "1e-400"),
        ("12", "1.2"),
        ("100", "\"100\""),
        ("0", "false"),
        ("0", "null"),
    ] {
        assert!(!is_equal(one, other), "{one} {other}");
    }
}

#[test]
fn objects_and_arrays_compare_by_structure() {
    assert!(is_equal(r#"{"a": 1, "b": [true, null]}"#, r#"{"b":[true,null],"a":1.0}"#));
    assert!(is_equal(r#"["\u0041\n", "é"]"#, r#"["A\u000a","\u00e9"]"#));
    assert!(is_equal("[ ]", "[]") && is_equal("{ }", "{}"));
    for (one, other) in [
        (r#"{"a":1}"#, r#"{"a":1,"b":2}"#),
        (r#"{"a":1}"#, r#"{"a":"1"}"#),
        ("[1,2]", "[2,1]"),
        ("[]", "{}"),
        ("[null]", "[]"),
        (r#""a""#, r#""A""#),
    ] {
        assert!(!is_equal(one, other), "{one} {other}");
    }
}

#[test]
fn operators_hold_as_documented() {
    use FilterOp::{Eq, Exists, In, Ne, Prefix};
    let payload = r#"{"country": "DE", "total": 100.0, "note": null, "lines": [{"sku": "A-1"}, {"sku": "B-2"}],
        "address": {"city": "Köln", "zip": "50667"}, "": 7, "a/b": 8, "m~n": 9, "10": "ten"}"#;
    for (path, op, value, expected) in [
        ("/country", Eq, Some(r#""DE""#), true),
        ("/country", Eq, Some(r#""de""#), false),
        ("/total", Eq, Some("1e2"), true),
        ("/total", Ne, Some("100"), false),
        ("/total", Ne, Some("\"100\""), true),
        ("/absent", Ne, Some("1"), true),
        ("/absent", Ne, Some("null"), true),
        ("/note", Ne, Some("null"), false),
        ("/note", Eq, Some("null"), true),
        ("/absent", Eq, Some("null"), false),
        ("/country", In, Some(r#"["AT", "DE"]"#), true),
        ("/country", In, Some(r#"["AT"]"#), false),
        ("/absent", In, Some("[null]"), false),
        ("/country", Prefix, Some(r#""D""#), true),
        ("/country", Prefix, Some(r#""""#), true),
        ("/country", Prefix, Some(r#""DEU""#), false),
        ("/total", Prefix, Some(r#""1""#), false),
        ("/absent", Prefix, Some(r#""""#), false),
        ("/note", Exists, None, true),
        ("/note", Exists, Some("true"), true),
        ("/absent", Exists, None, false),
        ("/absent", Exists, Some("false"), true),
        ("/note", Exists, Some("false"), false),
        ("/lines/1/sku", Eq, Some(r#""B-2""#), true),
        ("/lines/01/sku", Exists, None, false),
        ("/lines/-", Exists, None, false),
        ("/lines/2", Exists, None, false),
        ("/lines/length", Exists, None, false),
        ("/country/0", Exists, None, false),
        ("/lines/0", Eq, Some(r#"{"sku":"A-1"}"#), true),
        ("/address", Eq, Some(r#"{"zip":"50667","city":"K\u00f6ln"}"#), true),
        ("/address", Eq, Some(r#"{"zip":"50667"}"#), false),
        ("/", Eq, Some("7"), true),
        ("/a~1b", Eq, Some("8"), true),
        ("/m~0n", Eq, Some("9"), true),
        ("/10", Prefix, Some("\"t\""), true),
        ("", Exists, None, true),
        ("", Eq, Some("1"), false),
    ] {
        assert_eq!(holds(payload, path, op, value), expected, "{path} {} {value:?}", op.name());
    }
    assert!(holds("null", "", Eq, Some("null")) && holds("[1, 2]", "/1", Eq, Some("2")));
    assert!(holds(r#" "text" "#, "", Prefix, Some("\"te\"")));
}

#[test]
fn all_conditions_of_a_filter_must_hold() {
    let conditions = || vec![condition("/a", FilterOp::Eq, Some("1")), condition("/b", FilterOp::Exists, None)];
    let filter = Filter::new(conditions()).unwrap();
    let matches = |payload: &str| filter.matches(&Json::parse(payload.as_bytes()).unwrap());
    assert!(matches(r#"{"a":1,"b":null}"#) && !matches(r#"{"a":1}"#) && !matches(r#"{"b":1}"#));
    let many = conditions().into_iter().cycle().take(MAX_CONDITIONS + 1).collect();
    assert!(matches!(Filter::new(many), Err(FilterError::TooMany(17))));
    assert!(Filter::default().matches(&Json::Null));
}

#[test]
fn what_is_wrong_with_a_condition_is_named() {
    let long = format!("\"{}\"", "x".repeat(MAX_VALUE));
    let deep = format!("{}{}", "[".repeat(66), "]".repeat(66));
    let (long_path, many_parts) = (format!("/{}", "x".repeat(512)), "/x".repeat(33));
    for (path, op, value, part, detail) in [
        ("country", FilterOp::Exists, None, "path", "does not start with a slash"),
        ("/a~2", FilterOp::Exists, None, "path", "contains a ~"),
        ("/a~", FilterOp::Exists, None, "path", "contains a ~"),
        (&long_path, FilterOp::Exists, None, "path", "more than 512 characters"),
        (&many_parts, FilterOp::Exists, None, "path", "more than 32 parts"),
        ("/a", FilterOp::Eq, None, "value", "is missing"),
        ("/a", FilterOp::Ne, None, "value", "is missing"),
        ("/a", FilterOp::In, None, "value", "is missing"),
        ("/a", FilterOp::Prefix, None, "value", "is missing"),
        ("/a", FilterOp::Eq, Some("DE"), "value", "is not JSON"),
        ("/a", FilterOp::Eq, Some(""), "value", "is not JSON"),
        ("/a", FilterOp::Eq, Some(&long), "value", "longer than 1024 bytes"),
        ("/a", FilterOp::Eq, Some(&deep), "value", "nests deeper"),
        ("/a", FilterOp::Eq, Some(r#""\ud800""#), "value", "surrogate"),
        ("/a", FilterOp::In, Some("1"), "value", "is no array"),
        ("/a", FilterOp::In, Some("[]"), "value", "is empty"),
        ("/a", FilterOp::Prefix, Some("1"), "value", "is no text"),
        ("/a", FilterOp::Exists, Some("1"), "value", "neither true nor false"),
        ("/a", FilterOp::Exists, Some("null"), "value", "neither true nor false"),
    ] {
        let written = FilterCondition { path: path.to_owned(), op, value: value.map(JsonText::new) };
        let errors = Condition::new(written).unwrap_err();
        assert_eq!((errors.len(), errors[0].part), (1, part), "{errors:?}");
        assert!(errors[0].detail.contains(detail), "{errors:?}");
    }
    let both = FilterCondition { path: "a".to_owned(), op: FilterOp::Eq, value: None };
    assert_eq!(Condition::new(both).unwrap_err().len(), 2);
}

#[test]
fn a_filter_is_stored_as_it_was_written() {
    let text = r#"[{"path":"/a","op":"in","value":[1e2,18446744073709551617]},{"path":"/b","op":"eq","value":null},{"path":"","op":"exists"}]"#;
    let filter: Filter = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&filter).unwrap(), text);
    for bad in
        [r#"[{"path":"a","op":"exists"}]"#, r#"[{"path":"/a","op":"eq"}]"#, r#"[{"path":"/a","op":"like","value":1}]"#]
    {
        assert!(serde_json::from_str::<Filter>(bad).is_err(), "{bad}");
    }
}

#[test]
fn hostile_payloads_are_read_with_bounded_depth() {
    let depth = 500_000;
    let deep = format!(r#"{{"a":{}1{},"b":1}}"#, r#"[{"x":"#.repeat(depth), "}]".repeat(depth));
    assert!(holds(&deep, "/b", FilterOp::Eq, Some("1")));
    assert!(holds(&deep, "/a/0/x/0/x", FilterOp::Exists, None));
    assert!(holds(&deep, "/a", FilterOp::Ne, Some("[]")));
    assert!(Json::parse("[".repeat(1_000_000).as_bytes()).is_none());
    // What a condition can tell apart is above the depth that is read.
    let path = "/0".repeat(32);
    let value = format!("{}7{}", "[".repeat(64), "]".repeat(64));
    let payload = format!("{}7{}", "[".repeat(96), "]".repeat(96));
    assert!(holds(&payload, &path, FilterOp::Eq, Some(&value)));
}

#[test]
fn of_members_with_the_same_name_the_last_one_counts() {
    for (payload, expected) in [(r#"{"a":1,"a":2}"#, "2"), (r#"{"a":2,"b":0,"a":1,"c":0,"a":3}"#, "3")] {
        assert!(holds(payload, "/a", FilterOp::Eq, Some(expected)), "{payload}");
    }
    assert!(holds(r#"{"a":{"b":1},"a":{}}"#, "/a/b", FilterOp::Exists, Some("false")));
    assert!(is_equal(r#"{"a":1,"\u0061":2}"#, r#"{"a":2}"#));
}

#[test]
fn half_of_a_surrogate_pair_is_equal_to_nothing_and_hides_nothing() {
    let payload = r#"{"broken":"\ud800","\udc00":1,"":2,"fine":"\ud83d\ude00"}"#;
    assert!(holds(payload, "/fine", FilterOp::Eq, Some("\"😀\"")));
    assert!(holds(payload, "/", FilterOp::Eq, Some("2")));
    assert!(holds(payload, "/broken", FilterOp::Exists, None));
    assert!(holds(payload, "/broken", FilterOp::Ne, Some("\"\u{fffd}\"")));
    assert!(!holds(payload, "/broken", FilterOp::Prefix, Some("\"\"")));
    assert!(!is_equal(r#"{"\udc00":1,"a":1}"#, r#"{"a":1}"#));
}

#[test]
fn what_is_not_json_is_not_read() {
    for text in ["", " ", "{", "[1,]", "{\"a\":}", "nul", "01", "1.", "+1", "'a'", "\"\t\"", "1 2", "\u{feff}1"] {
        assert!(Json::parse(text.as_bytes()).is_none(), "{text}");
    }
    assert!(Json::parse(b"\"\xff\"").is_none());
}

/// Random JSON, as the values of another library.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3_i64..3).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[ab\\\\\"/~é😀\n]{0,3}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[ab/~\"]{0,2}", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn values_are_found_and_compared_as_by_serde_json(one in json_value(), other in json_value(), path in "(/([ab]|~0|~1|[0-2]){0,2}){0,3}") {
        let (text, other_text) = (serde_json::to_string_pretty(&one).unwrap(), other.to_string());
        prop_assert_eq!(is_equal(&text, &other_text), one == other);
        prop_assert!(is_equal(&text, &one.to_string()));
        let parsed = Json::parse(text.as_bytes()).unwrap();
        let found = parsed.find(&Pointer::parse(&path).unwrap());
        let expected = one.pointer(&path).map(Value::to_string);
        match (found, &expected) {
            (Some(found), Some(expected)) => prop_assert!(*found == Json::parse(expected.as_bytes()).unwrap()),
            (found, expected) => prop_assert!(found.is_none() && expected.is_none(), "{:?} {:?}", found, expected),
        }
    }

    #[test]
    fn the_same_texts_are_json_as_for_serde_json(text in "[\\[\\]{}:,\"ab\\\\ 01.e-]{0,12}") {
        prop_assert_eq!(Json::parse(text.as_bytes()).is_some(), serde_json::from_str::<&RawValue>(&text).is_ok());
    }

    #[test]
    fn numbers_compare_as_the_library_compares_them(one in -1000_i64..1000, scale in 0_u32..5, other in -1000_i64..1000) {
        let shifted = format!("{}e-{scale}", one * 10_i64.pow(scale));
        prop_assert!(is_equal(&one.to_string(), &shifted));
        prop_assert_eq!(is_equal(&shifted, &other.to_string()), one == other);
    }
}

#[test]
fn a_long_path_is_measured_in_characters() {
    assert!(Pointer::parse(&format!("/{}", "é".repeat(511))).is_ok());
}

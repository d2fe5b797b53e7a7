//! The filter of a subscription: what callers may send, and how each violation is named.

use posthaste_api::{
    FieldError, FilterCondition, FilterConditionIn, Input, InputError, NewSubscription, SubscriptionIn,
    filter_from_proto, filter_to_proto, read_json,
};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
#[serde(transparent)]
struct Request(SubscriptionIn);

impl Input for Request {
    type Checked = NewSubscription;

    fn validate(self) -> Result<NewSubscription, Vec<FieldError>> {
        self.0.validate()
    }
}

fn read(filter: &str) -> Result<NewSubscription, InputError> {
    let text = format!(
        r#"{{"subscriberId":"crm","eventKey":{{"eventType":"order.placed"}},"endpoint":"https://example.com/","filter":{filter}}}"#
    );
    read_json::<Request>(text.as_bytes())
}

fn refused(filter: &str) -> Vec<(String, String)> {
    match read(filter) {
        Err(InputError::Invalid(errors)) => errors.into_iter().map(|error| (error.field, error.detail)).collect(),
        other => panic!("{filter}: {other:?}"),
    }
}

#[test]
fn a_filter_is_kept_as_it_was_written() {
    let text = r#"[{"path":"/total","op":"in","value":[1.50,18446744073709551617]},{"path":"/note","op":"eq","value":null},{"path":"/gone","op":"exists","value":false}]"#;
    let new = read(text).unwrap();
    assert_eq!(serde_json::to_string(&new.filter).unwrap(), text);
    for none in ["[]", "null"] {
        assert!(read(none).unwrap().filter.is_empty(), "{none}");
    }
    let many = vec![json!({ "path": "/a", "op": "exists" }); 16];
    assert_eq!(read(&Value::from(many).to_string()).unwrap().filter.conditions().len(), 16);
}

#[test]
fn every_violation_of_a_filter_is_named_with_its_field() {
    let all = r#"[{"path":"/a","op":"exists"},{"path":"a","op":"eq"},{"path":"/a","op":"equals","value":1},{"value":1},
        {"path":"/a","op":"prefix","value":1},{"path":"/a","op":"prefx","value":"x"}]"#;
    let errors = refused(all);
    let fields: Vec<&str> = errors.iter().map(|(field, _)| field.as_str()).collect();
    let expected = [
        "filter[1].path",
        "filter[1].value",
        "filter[2].op",
        "filter[3].path",
        "filter[3].op",
        "filter[4].value",
        "filter[5].op",
    ];
    assert_eq!(fields, expected, "{errors:?}");
    assert!(errors[2].1.contains("known: eq, ne, in, prefix, exists"), "{errors:?}");
    assert!(errors[6].1.contains("did you mean \"prefix\"?"), "{errors:?}");

    for (filter, field, detail) in [
        (r#"[{"path":"/a","op":5}]"#, "filter[0].op", "wrong type"),
        (r#"[{"path":["a"],"op":"exists"}]"#, "filter[0].path", "wrong type"),
        (r#"[{"path":"/a","op":"exists"},{"path":"/a","op":"eq","vaule":1}]"#, "filter[1].vaule", "\"value\""),
        (r#"[{"path":"/a","op":"exists"},7]"#, "filter[1]", "wrong type"),
        (r#"{"path":"/a","op":"exists"}"#, "filter", "wrong type"),
        (r#""/a exists""#, "filter", "wrong type"),
    ] {
        let errors = refused(filter);
        assert_eq!(errors.len(), 1, "{filter}: {errors:?}");
        assert!(errors[0].0 == field && errors[0].1.contains(detail), "{filter}: {errors:?}");
    }
    let many = vec![json!({ "path": "wrong", "op": "exists" }); 17];
    let errors = refused(&Value::from(many).to_string());
    assert_eq!(errors, [("filter".to_owned(), "has more than 16 conditions".to_owned())]);
    let long = format!(r#"[{{"path":"/a","op":"eq","value":"{}"}}]"#, "x".repeat(1_023));
    assert_eq!(refused(&long)[0].0, "filter[0].value");
    let longest = format!(r#"[{{"path":"/a","op":"eq","value":"{}"}}]"#, "x".repeat(1_022));
    assert!(read(&longest).is_ok());
}

#[test]
fn protobuf_carries_the_same_conditions() {
    let written = r#"[{"path":"/total","op":"ne","value":18446744073709551617},{"path":"","op":"exists"}]"#;
    let conditions: Vec<FilterCondition> = serde_json::from_str(written).unwrap();
    let carried = filter_to_proto(&conditions);
    assert_eq!(carried[0], r#"{"path":"/total","op":"ne","value":18446744073709551617}"#);
    let expected: Vec<_> = conditions.into_iter().map(FilterConditionIn::from).collect();
    assert_eq!(filter_from_proto(&carried).unwrap(), expected);
    let wrong = ["{}", "not JSON", r#"{"paht":"/a"}"#].map(str::to_owned);
    let errors = filter_from_proto(&wrong).unwrap_err();
    assert_eq!(errors.iter().map(|error| error.field.as_str()).collect::<Vec<_>>(), ["filter[1]", "filter[2]"]);
    assert!(errors[1].detail.contains("did you mean \"path\"?"), "{errors:?}");
}

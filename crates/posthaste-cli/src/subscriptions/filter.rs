use posthaste_api::{FilterCondition, FilterConditionIn, JsonText};

/// Reads `PATH OP [JSON]`. The path and the operator are checked with the whole subscription.
pub(super) fn condition(text: &str) -> Result<FilterConditionIn, String> {
    const FORM: &str = r#"write PATH OP [JSON], such as '/country eq "DE"'"#;
    let text = text.trim();
    let (path, rest) = match text.starts_with('"') {
        true => {
            let mut values = serde_json::Deserializer::from_str(text).into_iter::<String>();
            let path = values.next().and_then(Result::ok).ok_or(FORM)?;
            (path, &text[values.byte_offset()..])
        }
        false => {
            let (path, rest) = text.split_once(char::is_whitespace).ok_or(FORM)?;
            (path.to_owned(), rest)
        }
    };
    let rest = rest.trim_start();
    let (op, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    if op.is_empty() {
        return Err(FORM.to_owned());
    }
    let value = Some(value.trim()).filter(|value| !value.is_empty());
    if value.is_some_and(|value| serde_json::from_str::<serde::de::IgnoredAny>(value).is_err()) {
        return Err(r#"the value is not JSON: a text needs quotation marks, such as '/country eq "DE"'"#.to_owned());
    }
    let value = value.map(JsonText::new);
    Ok(FilterConditionIn { path: Some(path), op: Some(op.to_owned()), value })
}

/// The conditions in the form that `--filter` reads.
pub(super) fn filter_text(filter: &[FilterCondition]) -> String {
    let text = |condition: &FilterCondition| {
        let is_plain = !condition.path.is_empty() && !condition.path.contains(char::is_whitespace);
        let path = match is_plain {
            true => condition.path.clone(),
            false => serde_json::Value::from(condition.path.as_str()).to_string(),
        };
        let value = condition.value.as_ref().map(|value| format!(" {value}"));
        format!("{path} {}{}", condition.op.name(), value.unwrap_or_default())
    };
    filter.iter().map(text).collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_has_a_path_an_operator_and_a_value() {
        for (text, path, op, value) in [
            (r#"/country eq "DE""#, "/country", "eq", Some(r#""DE""#)),
            ("  /total   in  [1, 2.50] ", "/total", "in", Some("[1, 2.50]")),
            ("/note exists", "/note", "exists", None),
            ("/note exists false", "/note", "exists", Some("false")),
            (r#""/first name" prefix "A b""#, "/first name", "prefix", Some(r#""A b""#)),
            (r#""" eq 1"#, "", "eq", Some("1")),
        ] {
            let read = condition(text).unwrap();
            assert_eq!((read.path.as_deref(), read.op.as_deref()), (Some(path), Some(op)), "{text}");
            assert_eq!(read.value.as_ref().map(JsonText::as_str), value, "{text}");
        }
        for text in ["", "/country", r#""/unfinished eq 1"#, r#""/only""#] {
            assert!(condition(text).unwrap_err().contains("PATH OP [JSON]"), "{text}");
        }
        assert!(condition("/country eq DE").unwrap_err().contains("quotation marks"));
    }

    #[test]
    fn shown_conditions_can_be_given_again() {
        let text = r#"[{"path":"/a b","op":"eq","value":null},{"path":"","op":"exists"},{"path":"/c","op":"in","value":[1.0]}]"#;
        let conditions: Vec<FilterCondition> = serde_json::from_str(text).unwrap();
        assert_eq!(filter_text(&conditions), r#""/a b" eq null and "" exists and /c in [1.0]"#);
        for written in conditions {
            assert_eq!(condition(&filter_text(std::slice::from_ref(&written))).unwrap(), written.into());
        }
    }
}

//! Turns "unknown" into "did you mean": for JSON bodies, query strings and configuration files alike.

/// How much of a name is shown, in characters: the caller decides how long it is.
const MAX_SHOWN: usize = 64;

/// The candidate that the caller probably meant, if one is near enough.
///
/// Case, `_` and `-` do not count: `event_type` is `eventType` to a person.
pub fn nearest<'a>(unknown: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let unknown = folded(unknown);
    let length = unknown.chars().count();
    if length == 0 || length > MAX_SHOWN {
        return None;
    }
    let distance = |candidate: &str| strsim::damerau_levenshtein(&unknown, &folded(candidate));
    let near = candidates.into_iter().map(|candidate| (distance(candidate), candidate));
    let (distance, candidate) = near.min_by_key(|(distance, _)| *distance)?;
    // About one slip in three letters; two letters in short words would fit anything.
    (distance <= (length / 3).max(1) && distance < length).then_some(candidate)
}

/// Rewrites the message of a serde error for a person: ``unknown field `x`, expected one of `a`, `b` `` becomes
/// `unknown field "x"; did you mean "a"?`, or lists what is known. Other messages stay as they are.
pub fn explain(message: &str) -> String {
    for (what, marker) in [("field", "unknown field `"), ("value", "unknown variant `")] {
        let Some((before, rest)) = message.split_once(marker) else { continue };
        // The unknown name comes from outside and may contain anything; what follows it does not.
        let Some((name, expected)) = rest.rsplit_once("`, expected ").or_else(|| rest.rsplit_once("`, there are no "))
        else {
            continue;
        };
        let (known, after) = backticked(expected);
        let after = after.strip_prefix("fields").or_else(|| after.strip_prefix("variants")).unwrap_or(after);
        return format!("{before}{}{after}", unknown(what, name, &known));
    }
    message.to_owned()
}

/// The message that `name` is unknown, with the probably meant name or all known ones.
pub(crate) fn unknown(what: &str, name: &str, known: &[&str]) -> String {
    let shown: String = name.chars().take(MAX_SHOWN).collect();
    match nearest(name, known.iter().copied()) {
        Some(candidate) => format!("unknown {what} {shown:?}; did you mean {candidate:?}?"),
        None if known.is_empty() => format!("unknown {what} {shown:?}; none is known here"),
        None => format!("unknown {what} {shown:?}; known: {}", known.join(", ")),
    }
}

/// Reads "one of `a`, `b`", "`a` or `b`" or "`a`"; returns the names and what follows them.
fn backticked(text: &str) -> (Vec<&str>, &str) {
    let mut names = Vec::new();
    let mut rest = text.strip_prefix("one of ").unwrap_or(text);
    while let Some((name, after)) = rest.strip_prefix('`').and_then(|rest| rest.split_once('`')) {
        names.push(name);
        let next = [", ", " or "].into_iter().find_map(|separator| after.strip_prefix(separator));
        match next.filter(|next| next.starts_with('`')) {
            Some(next) => rest = next,
            None => return (names, after),
        }
    }
    (names, rest)
}

fn folded(text: &str) -> String {
    text.chars().filter(|character| !matches!(character, '_' | '-')).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    const FIELDS: [&str; 4] = ["eventId", "eventType", "sourceService", "payload"];

    #[test]
    fn typos_and_other_naming_styles_are_near() {
        for (unknown, expected) in [
            ("eventTyp", Some("eventType")),
            ("event_type", Some("eventType")),
            ("event-id", Some("eventId")),
            ("EVENTTYPE", Some("eventType")),
            ("paylaod", Some("payload")),
            ("source", None),
            ("colour", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(nearest(unknown, FIELDS), expected, "{unknown}");
        }
        assert_eq!(nearest("x", ["y"]), None);
        assert_eq!(nearest("anything", []), None);
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Two {
        alpha: Option<u8>,
        beta: Option<Mode>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "UPPERCASE")]
    enum Mode {
        Fast,
        Safe,
        Slow,
    }

    fn json<'a, T: Deserialize<'a> + std::fmt::Debug>(text: &'a str) -> String {
        explain(&serde_json::from_str::<T>(text).unwrap_err().to_string())
    }

    #[test]
    fn messages_of_serde_json_are_explained() {
        assert_eq!(json::<Two>(r#"{"alpa":1}"#), r#"unknown field "alpa"; did you mean "alpha"? at line 1 column 7"#);
        assert_eq!(json::<Two>(r#"{"zzz":1}"#), r#"unknown field "zzz"; known: alpha, beta at line 1 column 6"#);
        assert_eq!(json::<Nothing>(r#"{"a":1}"#), r#"unknown field "a"; none is known here at line 1 column 4"#);
        assert_eq!(
            json::<Two>(r#"{"beta":"FASST"}"#),
            r#"unknown value "FASST"; did you mean "FAST"? at line 1 column 15"#
        );
        assert!(json::<Two>(r#"{"beta":"x"}"#).contains(r#"unknown value "x"; known: FAST, SAFE, SLOW"#));
        assert!(json::<Two>(r#"{"al`, expected `":1}"#).contains("known: alpha, beta"));
        let other = serde_json::from_str::<Two>("{").unwrap_err().to_string();
        assert_eq!(explain(&other), other);
    }

    #[test]
    fn messages_of_toml_are_explained_in_place() {
        let error = toml::from_str::<Two>("alhpa = 1\n").unwrap_err().to_string();
        let explained = explain(&error);
        assert!(explained.starts_with("TOML parse error at line 1"), "{explained}");
        assert!(explained.contains(r#"unknown field "alhpa"; did you mean "alpha"?"#), "{explained}");
    }

    #[test]
    fn a_long_unknown_name_is_cut() {
        assert!(explain(&format!("unknown field `{}`, expected `a`", "x".repeat(9_999))).len() < 200);
    }

    proptest! {
        #[test]
        fn no_message_panics(start in "(unknown field `|unknown variant `)?", rest in "[`a-z, é]{0,30}(, expected )?[`a-z ,]{0,30}") {
            explain(&format!("{start}{rest}"));
        }

        #[test]
        fn no_field_name_hides_what_is_known(name in "\\PC{1,40}") {
            let text = serde_json::json!({ name.clone(): 1 }).to_string();
            if name != "alpha" && name != "beta" {
                let explained = json::<Two>(&text);
                prop_assert!(explained.contains("known: alpha, beta") || explained.contains("did you mean"), "{}", explained);
            }
        }
    }
}

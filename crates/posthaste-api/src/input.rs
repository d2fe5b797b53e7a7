//! Reads the input of callers: all violations are found at once, and each is named with its field.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::problem::FieldError;
use crate::suggest;

/// How many violations one response lists. A caller with more of them has to send again anyway.
const MAX_LISTED: usize = 100;
/// How much of a message is shown, in characters: it may repeat what the caller sent.
const MAX_DETAIL: usize = 300;
/// The field of a nested object that decides which other fields the object may have.
const TAG: &str = "type";

/// The input of a call: a JSON object, or a query string.
///
/// Each field on its own, without the others, must be readable as `Self`. [`read_json`] and [`gather`] rely on it: they
/// read an input field by field if it cannot be read as a whole, so that every violation is named with its field.
pub trait Input: DeserializeOwned {
    /// The input after all rules were checked.
    type Checked;

    /// Groups of fields of which one is needed: when one of them cannot be read, the others are not missing.
    const EITHER: &[&[&str]] = &[];
    /// The error for a caller who sends an array.
    const ARRAY: &str = "the body is an array: send one JSON object";

    /// Checks every rule, and returns all violations.
    fn validate(self) -> Result<Self::Checked, Vec<FieldError>>;
}

/// Why an input is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputError {
    /// It is not JSON.
    Malformed(String),
    /// It is JSON and no object.
    NotAnObject(String),
    /// These fields are wrong.
    Invalid(Vec<FieldError>),
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(why) | Self::NotAnObject(why) => f.write_str(why),
            Self::Invalid(errors) => {
                f.write_str(&errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
            }
        }
    }
}

impl std::error::Error for InputError {}

/// Reads and checks a JSON object.
pub fn read_json<T: Input>(text: &[u8]) -> Result<T::Checked, InputError> {
    read_json_with::<T>(text, |_| Vec::new())
}

/// As [`read_json`]; `adjust` adds the input that is outside of the body, and returns its violations.
pub fn read_json_with<T: Input>(
    text: &[u8],
    adjust: impl FnOnce(&mut T) -> Vec<FieldError>,
) -> Result<T::Checked, InputError> {
    let malformed = |error: serde_json::Error| InputError::Malformed(format!("the body is not JSON: {error}"));
    // Serde would read an array as the fields of a struct in their order.
    if text.trim_ascii_start().first() != Some(&b'{') {
        let value: &RawValue = serde_json::from_slice(text).map_err(malformed)?;
        let is_array = value.get().starts_with('[');
        let reason = if is_array { T::ARRAY } else { "the body is not an object: send one JSON object" };
        return Err(InputError::NotAnObject(reason.to_owned()));
    }
    match serde_json::from_slice::<T>(text) {
        Ok(input) => checked(input, adjust).map_err(InputError::Invalid),
        Err(error) => {
            let fields: Fields<'_> = serde_json::from_slice(text).map_err(malformed)?;
            let parts: Vec<(String, &RawValue)> = fields.0;
            let read = |parts: &[&(String, &RawValue)]| object::<T>(parts);
            let errors = gather(&parts, message(&error), read, |part, message| culprits::<T>(part, message), adjust);
            Err(InputError::Invalid(errors))
        }
    }
}

/// Lists the violations of an input that cannot be read as a whole: those of each of its `parts` alone, and the rules
/// that the readable parts break. `whole` is the error if no part is wrong by itself.
pub fn gather<T: Input, P>(
    parts: &[(String, P)],
    whole: String,
    read: impl Fn(&[&(String, P)]) -> Result<T, String>,
    explain: impl Fn(&(String, P), String) -> Vec<FieldError>,
    adjust: impl FnOnce(&mut T) -> Vec<FieldError>,
) -> Vec<FieldError> {
    let (mut errors, mut good, mut bad, mut seen) = (Vec::new(), Vec::new(), HashSet::new(), HashSet::new());
    for part in parts {
        let name = part.0.as_str();
        if !seen.insert(name) {
            errors.push(FieldError::new(shortened(name, 64), "is given more than once"));
            bad.insert(name);
            continue;
        }
        match read(&[part]) {
            Ok(_) => good.push(part),
            Err(message) => {
                errors.extend(explain(part, message));
                bad.insert(name);
            }
        }
    }
    if let Ok(input) = read(&good) {
        let is_bad = |field: &str| {
            let field = field.split(['.', '[']).next().unwrap_or(field);
            let same_group = |group: &&[&str]| group.contains(&field) && group.iter().any(|name| bad.contains(name));
            bad.contains(field) || T::EITHER.iter().any(same_group)
        };
        let broken = checked(input, adjust).err().unwrap_or_default();
        errors.extend(broken.into_iter().filter(|error| !is_bad(&error.field)));
    }
    if errors.is_empty() {
        errors.push(FieldError::new("body", detail(&whole)));
    }
    let left_out = errors.len().saturating_sub(MAX_LISTED);
    if left_out > 0 {
        errors.truncate(MAX_LISTED);
        errors.push(FieldError::new("body", format!("has {left_out} more violations")));
    }
    errors
}

fn checked<T: Input>(
    mut input: T,
    adjust: impl FnOnce(&mut T) -> Vec<FieldError>,
) -> Result<T::Checked, Vec<FieldError>> {
    let mut errors = adjust(&mut input);
    match (input.validate(), errors.is_empty()) {
        (Ok(checked), true) => Ok(checked),
        (Ok(_), false) => Err(errors),
        (Err(more), _) => {
            errors.extend(more);
            Err(errors)
        }
    }
}

/// Reads `parts` and nothing else as a `T`.
fn object<T: Input>(parts: &[&(String, &RawValue)]) -> Result<T, String> {
    let fields: Vec<String> = parts.iter().map(|(name, value)| format!("{}:{value}", quoted(name))).collect();
    serde_json::from_str(&format!("{{{}}}", fields.join(","))).map_err(|error| message(&error))
}

/// Which parts of a field make it unreadable; the field itself when no single part does.
fn culprits<T: Input>((name, value): &(String, &RawValue), message: String) -> Vec<FieldError> {
    let holds = |inside: String| {
        let text = format!("{{{}:{inside}}}", quoted(name));
        serde_json::from_str::<T>(&text).map(drop).map_err(|error| self::message(&error))
    };
    let name = shortened(name, 64);
    let errors = inner_culprits(&name, value, &holds);
    if errors.is_empty() { vec![FieldError::new(name, detail(&message))] } else { errors }
}

/// Which parts of the value at `place` make it unreadable; none if no single part does. `holds` reads another value in its
/// place.
fn inner_culprits(place: &str, value: &RawValue, holds: &dyn Fn(String) -> Result<(), String>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Ok(Fields(fields)) = serde_json::from_str::<Fields<'_>>(value.get()) {
        let text = |(name, value): &(String, &RawValue)| format!("{}:{value}", quoted(name));
        let tag = fields.iter().find(|(name, _)| name == TAG).map(text);
        match (holds(format!("{{{}}}", tag.clone().unwrap_or_default())), &tag) {
            (Err(message), Some(_)) => errors.push(FieldError::new(format!("{place}.{TAG}"), detail(&message))),
            (Err(message), None) => errors.push(FieldError::new(place, detail(&message))),
            (Ok(()), _) => {
                for field in fields.iter().filter(|(name, _)| name != TAG) {
                    let with_tag: Vec<String> = tag.iter().cloned().chain([text(field)]).collect();
                    if let Err(message) = holds(format!("{{{}}}", with_tag.join(","))) {
                        let inner = shortened(&field.0, 64);
                        errors.push(FieldError::new(format!("{place}.{inner}"), detail(&message)));
                    }
                }
            }
        }
    } else if let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(value.get())
        && holds("[]".to_owned()).is_ok()
    {
        for (index, item) in items.iter().enumerate() {
            if let Err(message) = holds(format!("[{item}]")) {
                let place = format!("{place}[{index}]");
                let inner = inner_culprits(&place, item, &|inside| holds(format!("[{inside}]")));
                match inner.is_empty() {
                    true => errors.push(FieldError::new(place, detail(&message))),
                    false => errors.extend(inner),
                }
            }
        }
    }
    errors
}

/// The message of a serde error as the rest of a sentence that begins with the name of the field.
pub fn detail(message: &str) -> String {
    let text = match message.strip_prefix("invalid type: ") {
        Some(rest) => format!("is of the wrong type: {rest}"),
        None => suggest::explain(message),
    };
    shortened(&text, MAX_DETAIL)
}

/// The message without line and column, which do not refer to the caller's own text.
fn message(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).map(str::to_owned).unwrap_or(text)
}

fn quoted(name: &str) -> String {
    serde_json::Value::from(name).to_string()
}

fn shortened(text: &str, longest: usize) -> String {
    match text.char_indices().nth(longest) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The fields of a JSON object in their order, repeated ones included.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

//! Filters of subscriptions: conditions on the JSON payload of an event.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

mod json;
mod number;
mod pointer;

pub use json::{Json, Object};
pub use pointer::{Pointer, PointerError};

/// The most conditions of one filter.
pub const MAX_CONDITIONS: usize = 16;
/// The longest value of a condition: bytes of its JSON text.
pub const MAX_VALUE: usize = 1024;
/// How deep the value of a condition may nest. See [`Json::parse`] for what depends on it.
const MAX_VALUE_DEPTH: usize = 64;

/// Conditions on the JSON payload of an event, all of which must hold. Without conditions, every payload matches, also
/// one that is not JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<FilterCondition>", into = "Vec<FilterCondition>")]
pub struct Filter(Vec<Condition>);

/// One condition, as a caller writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterCondition {
    /// Where the value is in the payload: a JSON pointer (RFC 6901), such as `/order/lines/0/sku`.
    pub path: String,
    /// How the value in the payload is compared.
    pub op: FilterOp,
    /// The value to compare with.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "JsonText::some")]
    pub value: Option<JsonText>,
}

/// How a value in the payload is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilterOp {
    /// It is equal to the given value.
    Eq,
    /// It is not equal to the given value, or it is absent.
    Ne,
    /// It is equal to one of the given values.
    In,
    /// It is a text that starts with the given text.
    Prefix,
    /// It exists, also as null; with the value `false`: it is absent.
    Exists,
}

/// The text of a JSON value, as it was given. So numbers keep their digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonText(String);

/// A condition that was checked.
#[derive(Clone, Debug)]
pub struct Condition {
    written: FilterCondition,
    pointer: Pointer,
    test: Test,
}

/// What a condition asks of the value at its path.
#[derive(Clone, Debug)]
enum Test {
    Is(Json<'static>),
    IsNot(Json<'static>),
    IsOneOf(Vec<Json<'static>>),
    StartsWith(String),
    Exists(bool),
}

/// What is wrong with a condition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part} {detail}")]
pub struct ConditionError {
    /// The field of the condition: `path` or `value`.
    pub part: &'static str,
    /// The rest of a sentence that begins with the name of the field.
    pub detail: String,
}

/// Why a list of conditions is no filter.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// There are too many.
    #[error("{0} conditions are more than {MAX_CONDITIONS}")]
    TooMany(usize),
    /// One of them is wrong.
    #[error("condition {0} is wrong")]
    Condition(usize, #[source] ConditionError),
}

impl Filter {
    /// A filter with these conditions.
    pub fn new(conditions: Vec<Condition>) -> Result<Self, FilterError> {
        match conditions.len() > MAX_CONDITIONS {
            true => Err(FilterError::TooMany(conditions.len())),
            false => Ok(Self(conditions)),
        }
    }

    /// True if every event matches.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The conditions.
    pub fn conditions(&self) -> &[Condition] {
        &self.0
    }

    /// The conditions as the caller wrote them.
    pub fn written(&self) -> Vec<FilterCondition> {
        self.0.iter().map(|condition| condition.written.clone()).collect()
    }

    /// True if a payload that is this JSON value matches.
    pub fn matches(&self, payload: &Json<'_>) -> bool {
        self.0.iter().all(|condition| condition.holds(payload))
    }
}

impl TryFrom<Vec<FilterCondition>> for Filter {
    type Error = FilterError;

    fn try_from(written: Vec<FilterCondition>) -> Result<Self, FilterError> {
        let checked = written.into_iter().enumerate().map(|(index, condition)| {
            Condition::new(condition).map_err(|mut errors| FilterError::Condition(index, errors.remove(0)))
        });
        Self::new(checked.collect::<Result<_, _>>()?)
    }
}

impl From<Filter> for Vec<FilterCondition> {
    fn from(filter: Filter) -> Self {
        filter.0.into_iter().map(|condition| condition.written).collect()
    }
}

impl Condition {
    /// Checks a condition, and returns everything that is wrong with it: never an empty list.
    pub fn new(written: FilterCondition) -> Result<Self, Vec<ConditionError>> {
        let pointer =
            Pointer::parse(&written.path).map_err(|error| ConditionError { part: "path", detail: error.to_string() });
        let test = Test::new(written.op, written.value.as_ref())
            .map_err(|detail| ConditionError { part: "value", detail: detail.to_string() });
        match (pointer, test) {
            (Ok(pointer), Ok(test)) => Ok(Self { written, pointer, test }),
            (pointer, test) => Err(pointer.err().into_iter().chain(test.err()).collect()),
        }
    }

    /// Where the value is in the payload.
    pub fn pointer(&self) -> &Pointer {
        &self.pointer
    }

    /// The only values with which the condition holds. `None` if it also holds with others, or without a value.
    pub fn only_values(&self) -> Option<&[Json<'static>]> {
        match &self.test {
            Test::Is(value) => Some(std::slice::from_ref(value)),
            Test::IsOneOf(values) => Some(values),
            Test::IsNot(_) | Test::StartsWith(_) | Test::Exists(_) => None,
        }
    }

    fn holds(&self, payload: &Json<'_>) -> bool {
        let found = payload.find(&self.pointer);
        match &self.test {
            Test::Is(value) => found == Some(value),
            Test::IsNot(value) => found != Some(value),
            Test::IsOneOf(values) => found.is_some_and(|found| values.contains(found)),
            Test::StartsWith(prefix) => {
                matches!(found, Some(Json::Text(text)) if text.starts_with(prefix.as_str()))
            }
            Test::Exists(expected) => found.is_some() == *expected,
        }
    }
}

impl PartialEq for Condition {
    /// The rest of a condition is made from what was written.
    fn eq(&self, other: &Self) -> bool {
        self.written == other.written
    }
}

impl Eq for Condition {}

impl Test {
    fn new(op: FilterOp, text: Option<&JsonText>) -> Result<Self, &'static str> {
        let value = text.map(JsonText::value).transpose()?;
        let given = value.ok_or("is missing: give the value to compare with");
        Ok(match op {
            FilterOp::Eq => Self::Is(given?),
            FilterOp::Ne => Self::IsNot(given?),
            FilterOp::In => match given? {
                Json::Array(values) if values.is_empty() => {
                    return Err("is empty, so no event would match: add values");
                }
                Json::Array(values) => Self::IsOneOf(distinct(values)),
                _ => return Err("is no array: `in` takes the list of values, such as [1, 2]"),
            },
            FilterOp::Prefix => match given? {
                Json::Text(prefix) => Self::StartsWith(prefix.into_owned()),
                _ => return Err("is no text: `prefix` is for texts only"),
            },
            FilterOp::Exists => match given {
                Err(_) => Self::Exists(true),
                Ok(Json::Bool(expected)) => Self::Exists(expected),
                Ok(_) => return Err("is neither true nor false: `exists` takes true, which is the default, or false"),
            },
        })
    }
}

fn distinct(values: Vec<Json<'static>>) -> Vec<Json<'static>> {
    let mut kept: Vec<Json<'static>> = Vec::with_capacity(values.len());
    for value in values {
        if !kept.contains(&value) {
            kept.push(value);
        }
    }
    kept
}

impl FilterOp {
    /// All operators.
    pub const ALL: [Self; 5] = [Self::Eq, Self::Ne, Self::In, Self::Prefix, Self::Exists];

    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eq => "eq",
            Self::Ne => "ne",
            Self::In => "in",
            Self::Prefix => "prefix",
            Self::Exists => "exists",
        }
    }
}

impl JsonText {
    /// This text, which is checked when a condition is made of it.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads an optional field that is there, so that null is a value and not its absence.
    pub fn some<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Self>, D::Error> {
        Self::deserialize(deserializer).map(Some)
    }

    fn value(&self) -> Result<Json<'static>, &'static str> {
        if self.0.len() > MAX_VALUE {
            return Err("is longer than 1024 bytes of JSON text");
        }
        let value =
            Json::parse(self.0.as_bytes()).ok_or("is not JSON: a text needs quotation marks, such as \"DE\"")?;
        match value.is_comparable(MAX_VALUE_DEPTH) {
            true => Ok(value.into_owned()),
            false => Err("nests deeper than 64 levels, or contains half of a surrogate pair"),
        }
    }
}

impl fmt::Display for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let raw = RawValue::from_string(self.0.clone()).map_err(serde::ser::Error::custom)?;
        raw.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self(String::from(Box::<str>::from(raw))))
    }
}

#[cfg(test)]
mod tests;

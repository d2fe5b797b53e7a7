use posthaste_core::filter::{Condition, Filter, FilterCondition, FilterOp, JsonText, MAX_CONDITIONS};
use serde::{Deserialize, Serialize};

use crate::checks::Errors;
use crate::input::detail;
use crate::problem::FieldError;
use crate::suggest;

/// One condition of a filter, before it is checked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FilterConditionIn {
    /// Where the value is in the payload: a JSON pointer (RFC 6901), required. An empty text names the whole payload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// `eq`, `ne`, `in`, `prefix` or `exists`: required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The value to compare with: any JSON.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "JsonText::some")]
    pub value: Option<JsonText>,
}

/// Checks the conditions of a filter. If an error is added, the caller does not use the returned filter.
pub(crate) fn filter(conditions: Vec<FilterConditionIn>, errors: &mut Errors) -> Filter {
    if conditions.len() > MAX_CONDITIONS {
        errors.add("filter", format!("has more than {MAX_CONDITIONS} conditions"));
        return Filter::default();
    }
    let checked = conditions.into_iter().enumerate().filter_map(|(index, condition)| condition.checked(index, errors));
    Filter::new(checked.collect()).unwrap_or_default()
}

impl FilterConditionIn {
    fn checked(self, index: usize, errors: &mut Errors) -> Option<Condition> {
        let field = |part: &str| format!("filter[{index}].{part}");
        if self.path.is_none() {
            errors.add(&field("path"), "is missing: give a JSON pointer such as /order/country");
        }
        let names = FilterOp::ALL.map(FilterOp::name);
        let named = |name: &str| FilterOp::ALL.into_iter().find(|op| op.name() == name);
        let op = match self.op.as_deref() {
            None => {
                errors.add(&field("op"), format!("is missing: give one of {}", names.join(", ")));
                None
            }
            Some(name) => named(name).or_else(|| {
                errors.add(&field("op"), suggest::unknown("value", name, &names));
                None
            }),
        };
        // Without an operator, the path can still be checked.
        let path = self.path.clone().unwrap_or_default();
        let condition = match op {
            Some(op) => FilterCondition { path, op, value: self.value },
            None => FilterCondition { path, op: FilterOp::Exists, value: None },
        };
        let checked = Condition::new(condition);
        for error in checked.as_ref().err().into_iter().flatten() {
            errors.add(&field(error.part), error.detail.clone());
        }
        checked.ok().filter(|_| self.path.is_some() && op.is_some())
    }
}

impl From<FilterCondition> for FilterConditionIn {
    fn from(condition: FilterCondition) -> Self {
        Self { path: Some(condition.path), op: Some(condition.op.name().to_owned()), value: condition.value }
    }
}

/// The conditions as Protobuf carries them: each as JSON text, so that numbers keep all their digits.
pub fn filter_to_proto(filter: &[FilterCondition]) -> Vec<String> {
    // A condition that was checked can always be written.
    filter.iter().map(|condition| serde_json::to_string(condition).unwrap_or_default()).collect()
}

/// Reads the conditions that Protobuf carries. The rules are checked with the whole subscription.
pub fn filter_from_proto(filter: &[String]) -> Result<Vec<FilterConditionIn>, Vec<FieldError>> {
    let (mut conditions, mut errors) = (Vec::new(), Vec::new());
    for (index, text) in filter.iter().enumerate() {
        match serde_json::from_str(text) {
            Ok(condition) => conditions.push(condition),
            Err(error) => errors.push(FieldError::new(format!("filter[{index}]"), detail(&error.to_string()))),
        }
    }
    if errors.is_empty() { Ok(conditions) } else { Err(errors) }
}

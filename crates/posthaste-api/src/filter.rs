use posthaste_core::filter::{Condition, Filter, FilterCondition, FilterOp, JsonText, MAX_CONDITIONS};
use serde::{Deserialize, Serialize};

use crate::checks::Errors;
use crate::{proto, suggest};

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

impl From<FilterCondition> for proto::FilterCondition {
    fn from(condition: FilterCondition) -> Self {
        Self {
            op: proto::FilterOp::from(condition.op).into(),
            path: condition.path,
            value: condition.value.map(|value| value.as_str().to_owned()),
        }
    }
}

impl From<proto::FilterCondition> for FilterConditionIn {
    /// An operator that is not known is refused when the condition is checked, as a missing one is.
    fn from(condition: proto::FilterCondition) -> Self {
        let op = match condition.op() {
            proto::FilterOp::Unspecified => None,
            proto::FilterOp::Eq => Some(FilterOp::Eq),
            proto::FilterOp::Ne => Some(FilterOp::Ne),
            proto::FilterOp::In => Some(FilterOp::In),
            proto::FilterOp::Prefix => Some(FilterOp::Prefix),
            proto::FilterOp::Exists => Some(FilterOp::Exists),
        };
        Self {
            path: Some(condition.path),
            op: op.map(|op| op.name().to_owned()),
            value: condition.value.map(JsonText::new),
        }
    }
}

impl From<FilterOp> for proto::FilterOp {
    fn from(op: FilterOp) -> Self {
        match op {
            FilterOp::Eq => Self::Eq,
            FilterOp::Ne => Self::Ne,
            FilterOp::In => Self::In,
            FilterOp::Prefix => Self::Prefix,
            FilterOp::Exists => Self::Exists,
        }
    }
}

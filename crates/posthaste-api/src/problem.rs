use std::fmt;

use serde::{Deserialize, Serialize};

/// The error of a call, in the format of RFC 9457.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A URI that names the kind of problem; `about:blank` means that the status names it.
    #[serde(rename = "type", default = "about_blank")]
    pub problem_type: String,
    /// The kind of problem in a few words, the same for every occurrence.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What happened this time, and what to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// A stable word for programs, such as `event_id_conflict`.
    pub code: String,
    /// All violations of an input.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
}

/// A violation in one field of an input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldError {
    /// The name as the input spells it; a dot separates an object from its field.
    pub field: String,
    /// What is wrong with it, and what would be right.
    pub detail: String,
}

impl Problem {
    /// The media type of a problem.
    pub const CONTENT_TYPE: &str = "application/problem+json";

    /// A problem whose kind is named by its status.
    pub fn new(status: u16, code: impl Into<String>, title: impl Into<String>) -> Self {
        Self {
            problem_type: about_blank(),
            title: title.into(),
            status,
            detail: None,
            code: code.into(),
            errors: Vec::new(),
        }
    }

    /// Adds what happened this time.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Adds the violations of an input.
    #[must_use]
    pub fn errors(mut self, errors: Vec<FieldError>) -> Self {
        self.errors = errors;
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The detail of an invalid input already names its violations.
        f.write_str(self.detail.as_deref().unwrap_or(&self.title))
    }
}

impl FieldError {
    /// A violation of `field`.
    pub fn new(field: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { field: field.into(), detail: detail.into() }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.detail)
    }
}

fn about_blank() -> String {
    "about:blank".to_owned()
}

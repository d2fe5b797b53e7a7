use chrono::{DateTime, Utc};

use crate::problem::FieldError;

/// Collects the violations of an input, so that all of them are reported at once.
#[derive(Default)]
pub(crate) struct Errors(pub(crate) Vec<FieldError>);

impl Errors {
    pub(crate) fn add(&mut self, field: &str, detail: impl Into<String>) {
        self.0.push(FieldError::new(field, detail));
    }

    /// Returns `value`, or the errors if there are any.
    pub(crate) fn none_or<T>(self, value: T) -> Result<T, Vec<FieldError>> {
        if self.0.is_empty() { Ok(value) } else { Err(self.0) }
    }

    /// Checks a name, a tenant or an id: one line of text that is not empty. Control characters would reach logs,
    /// terminals and HTTP headers, and some databases cannot store NUL.
    pub(crate) fn check_name(&mut self, field: &str, text: &str, longest: usize, hint: &str) {
        let length = text.chars().count();
        if length == 0 || length > longest {
            self.add(field, format!("is not 1 to {longest} characters{hint}"));
        }
        if let Some(character) = text.chars().find(|character| character.is_control()) {
            self.add(field, refused_character(character));
        }
    }

    /// Checks a text for people, which may have several lines.
    pub(crate) fn check_note(&mut self, field: &str, text: &str, longest: usize) {
        if text.chars().count() > longest {
            self.add(field, format!("has more than {longest} characters"));
        }
        let refused = |character: &char| character.is_control() && !matches!(character, '\n' | '\r' | '\t');
        if let Some(character) = text.chars().find(refused) {
            self.add(field, refused_character(character));
        }
    }
}

/// Reads a time of an input; `None` if there is none, or if it breaks the rule.
pub fn read_time(field: &str, text: Option<String>, errors: &mut Vec<FieldError>) -> Option<DateTime<Utc>> {
    let time = DateTime::parse_from_rfc3339(&text?);
    if time.is_err() {
        errors.push(FieldError::new(field, "is not a time such as 2026-01-31T12:00:00Z"));
    }
    time.ok().map(|time| time.with_timezone(&Utc))
}

fn refused_character(character: char) -> String {
    format!("contains the control character U+{:04X}: remove it", u32::from(character))
}

use std::fmt;

use serde::{Deserialize, Serialize};

/// The name of an outbox table: checked, because names cannot be bound as parameters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TableName(String);

/// The text is not a valid table name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table name {0:?} is not 1 to 48 characters of A-Z a-z 0-9 _ that start with a letter or _")]
pub struct BadTableName(String);

impl TableName {
    /// A name of 1 to 48 letters, digits and underscores that does not start with a digit. Words that SQL reserves,
    /// such as `order` and `user`, are allowed: statements quote them. PostgreSQL reads every name in lower case.
    pub fn new(name: impl Into<String>) -> Result<Self, BadTableName> {
        let name = name.into();
        let starts_well = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
        let goes_on_well = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        match starts_well && goes_on_well && name.len() <= 48 {
            true => Ok(Self(name)),
            false => Err(BadTableName(name)),
        }
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The same name without capital letters, for databases that fold names.
    #[must_use]
    pub fn to_lowercase(&self) -> Self {
        Self(self.0.to_ascii_lowercase())
    }
}

impl TryFrom<String> for TableName {
    type Error = BadTableName;

    fn try_from(name: String) -> Result<Self, BadTableName> {
        Self::new(name)
    }
}

impl From<TableName> for String {
    fn from(name: TableName) -> Self {
        name.0
    }
}

impl Default for TableName {
    fn default() -> Self {
        Self("outbox_event".to_owned())
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_other_characters_than_letters_digits_and_underscores_is_refused() {
        for good in ["outbox_event", "_x", "T1"] {
            assert_eq!(TableName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "1x", "a b", "a;drop", "a\"b", "a.b", "é", &"x".repeat(49)] {
            assert!(TableName::new(bad).is_err(), "{bad}");
        }
    }
}

//! The column `filter` of the table `subscription`: the conditions as a JSON array, or NULL if there are none. It is a text
//! on every database, because PostgreSQL's own type for JSON would change numbers.

use posthaste_core::filter::Filter;

pub(crate) fn filter_text(filter: &Filter) -> Result<Option<String>, sqlx::Error> {
    let text = (!filter.is_empty()).then(|| serde_json::to_string(filter));
    text.transpose().map_err(|error| sqlx::Error::Encode(error.into()))
}

pub(crate) fn filter(text: Option<String>) -> Result<Filter, sqlx::Error> {
    let filter = text.map(|text| serde_json::from_str(&text)).transpose();
    filter.map(Option::unwrap_or_default).map_err(|error| sqlx::Error::Decode(error.into()))
}

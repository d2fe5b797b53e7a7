//! PostgreSQL cannot store U+0000 in a text. Texts that come from outside may have it.

/// The nearest text that PostgreSQL can store.
pub(super) fn storable_text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// True if PostgreSQL can neither store this text nor compare with it.
pub(super) fn has_nul(text: &Option<String>) -> bool {
    text.as_ref().is_some_and(|text| text.contains('\0'))
}

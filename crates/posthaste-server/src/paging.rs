use posthaste_api::FieldError;
use posthaste_hub::PageRequest;
use uuid::Uuid;

/// The largest page of any list.
const MAX_SIZE: u32 = 500;
const DEFAULT_SIZE: u32 = 50;

/// Pages count from 0 and have at most 500 entries. A cursor, which is the id of the previous page's last entry,
/// selects a page instead of its number.
pub(crate) fn page_request(
    page: Option<u32>,
    size: Option<u32>,
    cursor: Option<String>,
    errors: &mut Vec<FieldError>,
) -> PageRequest {
    let size = size.unwrap_or(DEFAULT_SIZE);
    if !(1..=MAX_SIZE).contains(&size) {
        errors.push(FieldError::new("size", format!("is {size} and not 1 to {MAX_SIZE}")));
    }
    if page.is_some() && cursor.is_some() {
        errors.push(FieldError::new("cursor", "is given together with page: give only one of them"));
    }
    PageRequest { page: page.unwrap_or(0), size, after: cursor }
}

/// Like [`page_request`], for lists that are sorted by id.
pub(crate) fn page_request_by_id(
    page: Option<u32>,
    size: Option<u32>,
    cursor: Option<String>,
    errors: &mut Vec<FieldError>,
) -> PageRequest {
    if cursor.as_ref().is_some_and(|cursor| Uuid::parse_str(cursor).is_err()) {
        errors.push(FieldError::new(
            "cursor",
            "is not a cursor of this list: take it from nextCursor of the page before",
        ));
    }
    page_request(page, size, cursor, errors)
}

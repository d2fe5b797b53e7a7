use posthaste_api::FieldError;
use posthaste_hub::PageRequest;

/// The largest page of any list.
const MAX_SIZE: u32 = 500;
const DEFAULT_SIZE: u32 = 50;

/// Pages count from 0 and have at most 500 entries.
pub(crate) fn page_request(page: Option<u32>, size: Option<u32>, errors: &mut Vec<FieldError>) -> PageRequest {
    let size = size.unwrap_or(DEFAULT_SIZE);
    if !(1..=MAX_SIZE).contains(&size) {
        errors.push(FieldError::new("size", format!("is {size} and not 1 to {MAX_SIZE}")));
    }
    PageRequest { page: page.unwrap_or(0), size }
}

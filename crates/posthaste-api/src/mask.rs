/// Stands in an answer for a value that is kept sealed. Sent back in an update, it means the stored value.
pub const MASK: &str = "***";

/// An address without the values of its query string, which may be tokens.
pub fn masked_endpoint(address: &str) -> String {
    let Some((place, query)) = address.split_once('?') else { return address.to_owned() };
    let hidden = query.split('&').map(|pair| match pair.split_once('=') {
        Some((name, _)) => format!("{name}={MASK}"),
        // A query without names is all value.
        None => MASK.to_owned(),
    });
    format!("{place}?{}", hidden.collect::<Vec<_>>().join("&"))
}

/// Whether an address has a masked value in the place of a real one.
pub fn is_masked_endpoint(address: &str) -> bool {
    let query = address.split_once('?').map(|(_, query)| query).unwrap_or_default();
    query.split('&').any(|pair| pair.split_once('=').map_or(pair, |(_, value)| value) == MASK)
}

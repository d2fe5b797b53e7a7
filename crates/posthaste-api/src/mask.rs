/// Replaces a sealed value in a response. In an update, it means the stored value.
pub const MASK: &str = "***";

/// An address without the values of its query string, which may be tokens.
pub fn masked_endpoint(address: &str) -> String {
    let Some((place, query)) = address.split_once('?') else { return address.to_owned() };
    let hidden = query.split('&').map(|pair| match pair.split_once('=') {
        Some((name, _)) => format!("{name}={MASK}"),
        // A pair without a name is all value.
        None => MASK.to_owned(),
    });
    format!("{place}?{}", hidden.collect::<Vec<_>>().join("&"))
}

/// True if an address has a masked value in the place of a real one.
pub fn is_masked_endpoint(address: &str) -> bool {
    let query = address.split_once('?').map(|(_, query)| query).unwrap_or_default();
    query.split('&').any(|pair| pair.split_once('=').map_or(pair, |(_, value)| value) == MASK)
}

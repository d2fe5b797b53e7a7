use serde::Serialize;

/// Many values as one bind, which statements read with `json_each`.
pub(super) fn json(values: &(impl Serialize + ?Sized)) -> Result<String, sqlx::Error> {
    serde_json::to_string(values).map_err(|error| sqlx::Error::Encode(error.into()))
}

use posthaste_api::{FieldError, Input, MASK, NewSubscription, SubscriptionIn, is_masked_endpoint};
use posthaste_webhook::{Endpoint, check_custom_headers};
use serde::Deserialize;

/// A new subscription. Its fields are checked, and that requests can be built from them.
#[derive(Deserialize)]
#[serde(transparent)]
pub struct SubscriptionRequest(SubscriptionIn);

/// A subscription that replaces another. Secrets that are absent keep their stored values.
#[derive(Deserialize)]
#[serde(transparent)]
pub struct SubscriptionReplacement(SubscriptionIn);

impl From<SubscriptionIn> for SubscriptionRequest {
    fn from(subscription: SubscriptionIn) -> Self {
        Self(subscription)
    }
}

impl Input for SubscriptionRequest {
    type Checked = NewSubscription;

    const EITHER: &[&[&str]] = TARGET;

    fn validate(self) -> Result<NewSubscription, Vec<FieldError>> {
        let mut errors = unsendable(&self.0);
        errors.extend(masked(&self.0));
        with_more(self.0.validate(), errors)
    }
}

impl Input for SubscriptionReplacement {
    type Checked = NewSubscription;

    const EITHER: &[&[&str]] = TARGET;

    fn validate(self) -> Result<NewSubscription, Vec<FieldError>> {
        let unsendable = unsendable(&self.0);
        with_more(self.0.validate_update(), unsendable)
    }
}

/// A subscription names its events by one of these.
const TARGET: &[&[&str]] = &[&["definitionId", "eventKey"]];

/// Errors of fields from which no request can be built. A missing URL is reported elsewhere.
fn unsendable(subscription: &SubscriptionIn) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if !subscription.endpoint.is_empty()
        && let Err(error) = Endpoint::parse(&subscription.endpoint)
    {
        errors.push(FieldError::new("endpoint", error.to_string()));
    }
    let headers = subscription.headers.iter().flat_map(|headers| &headers.0);
    if let Err(error) = check_custom_headers(headers.map(|(name, value)| (name, value))) {
        errors.push(FieldError::new("headers", error.to_string()));
    }
    errors
}

/// Errors of masked fields: a new subscription has no stored values that could replace a mask.
fn masked(subscription: &SubscriptionIn) -> Vec<FieldError> {
    let why = format!("is {MASK}, which only hides a stored value: give the value itself");
    let headers = subscription.headers.iter().flat_map(|headers| &headers.0);
    let headers = headers.filter(|(_, value)| value == MASK).map(|(name, _)| format!("headers.{name}"));
    let endpoint = is_masked_endpoint(&subscription.endpoint).then(|| "endpoint".to_owned());
    endpoint.into_iter().chain(headers).map(|field| FieldError::new(field, why.clone())).collect()
}

fn with_more<T>(checked: Result<T, Vec<FieldError>>, more: Vec<FieldError>) -> Result<T, Vec<FieldError>> {
    match checked {
        Ok(checked) if more.is_empty() => Ok(checked),
        Ok(_) => Err(more),
        Err(mut errors) => {
            errors.extend(more);
            Err(errors)
        }
    }
}

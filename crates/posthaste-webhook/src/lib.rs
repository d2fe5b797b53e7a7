//! Sends one safe, authenticated HTTP request, and interprets the response.
//!
//! A [`Client`] sends a [`Request`] to an [`Endpoint`] once and returns a [`posthaste_core::Outcome`]. The caller
//! decides if and when to try again: nothing here repeats a request whose first byte may have reached the subscriber,
//! follows a redirect, or waits beyond the request's deadline.
//!
//! Subscribers choose the endpoints, so a client connects only to public addresses, unless its [`EgressPolicy`] allows
//! others.
//!
//! Operators read failures and databases store them, so no text made here contains credentials or the values of an
//! endpoint's query string, not even when the subscriber's response echoes them.

mod answer;
mod auth;
mod client;
mod connection;
mod egress;
mod endpoint;
mod header;
mod redact;
mod request;
mod response_body;
mod retry_after;

pub use auth::{Auth, AuthError};
pub use client::{Client, ClientOptions, Exchange, ResponseKind};
pub use egress::{Cidr, CidrError, DeniedAddress, EgressDenied, EgressGuard, EgressPolicy, Resolve, Resolving};
pub use endpoint::{Endpoint, EndpointError, MAX_ENDPOINT};
pub use header::{HeaderError, MAX_CUSTOM_HEADERS, check_custom_headers};
pub use request::{Request, RequestError};

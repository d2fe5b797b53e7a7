use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::problem::{Code, ErrorResponse};

/// Refuses requests whose Host header names another machine. Otherwise a foreign web page could point its own host name
/// at this loopback server, and call it from a visitor's browser (DNS rebinding).
pub(crate) async fn refuse_foreign(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.or_else(|| request.uri().host());
    match host.is_some_and(is_this_machine) {
        true => next.run(request).await,
        false => ErrorResponse::of(Code::ForeignHost, "call this server as localhost or 127.0.0.1").into_response(),
    }
}

fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_host_names_of_this_machine_are_accepted() {
        for host in ["localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:8080", "127.0.0.2", "[::1]:8080", "[::1]"] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in
            ["", "example.com", "example.com:8080", "localhost.example.com", "10.0.0.1", "[::2]", "127.0.0.1.nip.io"]
        {
            assert!(!is_this_machine(host), "{host}");
        }
    }
}

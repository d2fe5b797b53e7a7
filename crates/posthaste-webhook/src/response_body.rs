use http_body_util::BodyExt;
use hyper::body::Incoming;

/// How much of a response body is read before the connection is given up.
const MAX_RESPONSE_BODY: usize = 64 * 1_024;

/// How much of the body of a refusal is kept, so that secrets can be removed before it is cut.
pub(crate) const MAX_KEPT_BODY: usize = 16 * 1_024;

/// Reads a body to its end or its limit and returns the first `kept` bytes of it.
///
/// Only a connection whose response was read to the end can be used again; past the limit, dropping the body closes it.
pub(crate) async fn read(mut body: Incoming, kept: usize) -> Result<Vec<u8>, hyper::Error> {
    let mut start = Vec::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let Some(data) = frame?.into_data().ok() else { continue };
        start.extend_from_slice(&data[..data.len().min(kept - start.len())]);
        length += data.len();
        if length > MAX_RESPONSE_BODY {
            break;
        }
    }
    Ok(start)
}

/// Carries a trace with an event from its write to its delivery, in the W3C headers `traceparent` and `tracestate`.
///
/// This library creates spans (with `tracing`) but does not export them. A service that has an exporter implements this
/// trait with a few lines for its telemetry library.
pub trait TraceContext: Send + Sync + 'static {
    /// The headers of the current trace while an event is being written; empty if there is no trace.
    fn current(&self) -> Vec<(String, String)>;

    /// Makes `span`, in which a listener is about to run, a child of the span that these headers name.
    fn continue_in(&self, span: &tracing::Span, headers: &[(String, String)]);
}

/// The header that names the trace and the span within it.
pub const TRACEPARENT: &str = "traceparent";

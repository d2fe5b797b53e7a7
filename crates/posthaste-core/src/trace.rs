/// How a trace is carried with an event from where it is written to where it is delivered, as the W3C headers
/// `traceparent` and `tracestate`.
///
/// This library knows spans (by `tracing`) but no exporter of them. A service that has one implements this with the few
/// lines that its telemetry library asks for.
pub trait TraceContext: Send + Sync + 'static {
    /// The headers of what is going on where an event is being written; none when nothing is traced.
    fn current(&self) -> Vec<(String, String)>;

    /// Makes `span`, in which a listener is about to run, a child of what these headers name.
    fn continue_in(&self, span: &tracing::Span, headers: &[(String, String)]);
}

/// The header that names the trace and the span within it.
pub const TRACEPARENT: &str = "traceparent";

-- What happened to each event, and what operators did. Rows are only inserted and, when they are old, deleted.
CREATE TABLE audit_log (
    -- A process may append the same entry again: the id keeps it once.
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL,
    -- What happened: LogType in posthaste-core.
    log_type smallint NOT NULL,
    event_id text,
    event_type text,
    subscription_id text,
    subscriber_id text,
    domain text,
    topic text,
    attempt integer,
    -- The HTTP status with which the endpoint responded.
    status_code integer,
    error_code text,
    message text,
    duration_ms bigint
);

-- The list of all entries, and retention.
CREATE INDEX audit_log_at ON audit_log (at, id);
-- The trail of an event.
CREATE INDEX audit_log_event ON audit_log (event_id, at, id) WHERE event_id IS NOT NULL;
-- The lists by type, among them that of deliveries by outcome.
CREATE INDEX audit_log_type ON audit_log (log_type, at, id);
-- The lists of a subscription.
CREATE INDEX audit_log_subscription ON audit_log (subscription_id, log_type, at, id) WHERE subscription_id IS NOT NULL;
-- The list of deliveries by status. Nearly all deliveries have the status 200, so the list by type serves for it.
CREATE INDEX audit_log_status ON audit_log (status_code, log_type, at, id) WHERE status_code <> 200;

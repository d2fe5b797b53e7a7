-- What happened to each event, and what operators did. Rows are only inserted and, when they are old, deleted.
CREATE TABLE audit_log (
    -- Microseconds since 1970. The table is stored in the order of its list, so that inserts are at its end.
    at INTEGER NOT NULL,
    id BLOB NOT NULL,
    -- What happened: LogType in posthaste-core.
    log_type INTEGER NOT NULL,
    event_id TEXT,
    event_type TEXT,
    subscription_id TEXT,
    subscriber_id TEXT,
    domain TEXT,
    topic TEXT,
    attempt INTEGER,
    -- The HTTP status with which the endpoint responded.
    status_code INTEGER,
    error_code TEXT,
    message TEXT,
    duration_ms INTEGER,
    PRIMARY KEY (at, id)
) WITHOUT ROWID;

-- The trail of an event, and the check that an entry is not there yet.
CREATE INDEX audit_log_event ON audit_log (event_id, at, id) WHERE event_id IS NOT NULL;
-- The lists by type, among them that of deliveries by outcome.
CREATE INDEX audit_log_type ON audit_log (log_type, at, id);
-- The lists of a subscription.
CREATE INDEX audit_log_subscription ON audit_log (subscription_id, log_type, at, id) WHERE subscription_id IS NOT NULL;
-- The list of deliveries by status. Nearly all deliveries have the status 200, so the list by type serves for it.
CREATE INDEX audit_log_status ON audit_log (status_code, log_type, at, id) WHERE status_code <> 200;

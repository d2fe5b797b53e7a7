-- The events that were processed: one row for each listener and event.
CREATE TABLE {table} (
    listener    TEXT NOT NULL CHECK (length(listener) BETWEEN 1 AND 128),
    event_id    TEXT NOT NULL CHECK (length(event_id) BETWEEN 1 AND 128),
    -- Milliseconds since 1970 of the database's clock.
    received_at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    PRIMARY KEY (listener, event_id)
) WITHOUT ROWID;

-- The purge: finds the oldest rows.
CREATE INDEX {table}_received ON {table} (received_at);

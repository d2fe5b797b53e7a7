-- The events that were processed: one row for each listener and event.
CREATE TABLE {table} (
    listener    varchar(128) COLLATE "C" NOT NULL,
    event_id    varchar(128) COLLATE "C" NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (listener, event_id)
);

-- The purge: finds the oldest rows.
CREATE INDEX {table}_received ON {table} (received_at);

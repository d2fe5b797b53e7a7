-- The events that were processed: one row for each listener and event.
CREATE TABLE {table} (
    listener    VARCHAR(128) NOT NULL,
    event_id    VARCHAR(128) NOT NULL,
    received_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (listener, event_id),
    -- The purge: finds the oldest rows.
    INDEX {table}_received (received_at)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which events a receiver has had, one row for each of its listeners that had it.
CREATE TABLE {table} (
    listener    VARCHAR(128) NOT NULL,
    event_id    VARCHAR(128) NOT NULL,
    received_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (listener, event_id),
    -- What is old enough to be orphaned.
    INDEX {table}_received (received_at)
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Which events a receiver has had, one row for each of its listeners that had it.
CREATE TABLE {table} (
    listener    varchar(128) COLLATE "C" NOT NULL,
    event_id    varchar(128) COLLATE "C" NOT NULL,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (listener, event_id)
);

-- What is old enough to be orphaned.
CREATE INDEX {table}_received ON {table} (received_at);

-- The built-in bus: topics of partitions, each a row of records numbered without gaps.
-- An append adds to next_offset and inserts its records in one transaction, so offsets become visible in order.
CREATE TABLE log_partition (
    -- What records and groups refer to: shorter than a name in every row.
    id          INTEGER PRIMARY KEY,
    topic       TEXT NOT NULL,
    -- From 0. A topic keeps the number of partitions that it was made with, or routes would change partition.
    partition   INTEGER NOT NULL,
    -- The offset that the next record gets; what an append takes its offsets from and the backlog is measured by.
    next_offset INTEGER NOT NULL DEFAULT 0,
    -- To find a topic's partitions when it is first published to, and to make each only once.
    UNIQUE (topic, partition)
);

-- A table with rowids, appended to at its end. As WITHOUT ROWID it would be one index less, but such a table keeps no
-- more than a quarter of a page of a row beside its key, and the usual value would have its rest on a page of its own.
CREATE TABLE log_record (
    partition_id INTEGER NOT NULL REFERENCES log_partition (id),
    "offset"     INTEGER NOT NULL,
    -- Milliseconds since 1970 of the database's clock. Shown beside an event, and what retention goes by.
    created_at   INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
    -- The event id.
    key          TEXT NOT NULL,
    -- A JSON array of [name, value] pairs; NULL where there are none.
    headers      TEXT,
    -- Last, so that nothing else of a record lies behind the pages of a large one.
    value        BLOB NOT NULL
);

-- A fetch: a range of one partition, in order. Also what keeps an offset from being given twice.
CREATE UNIQUE INDEX log_record_place ON log_record (partition_id, "offset");
-- "Where did this event go": all records of an event id.
CREATE INDEX log_record_key ON log_record (key);

-- How far each group has come in each partition, and which of its consumers reads it now.
CREATE TABLE log_group (
    group_name   TEXT NOT NULL,
    partition_id INTEGER NOT NULL REFERENCES log_partition (id),
    -- The lowest offset that is not done.
    watermark    INTEGER NOT NULL,
    -- What is done above the watermark, as runs of "distance+length".
    completed    TEXT NOT NULL DEFAULT '',
    -- The consumer that holds the lease; NULL is free.
    owner        TEXT,
    -- One more with each owner: fences what an earlier owner still wants to record.
    generation   INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since 1970 of the database's clock; anybody may take the partition after that.
    leased_until INTEGER NOT NULL DEFAULT 0,
    -- An ack, and taking all free partitions of one group.
    PRIMARY KEY (group_name, partition_id)
) WITHOUT ROWID;

-- All groups of one partition: which of them have done a record, and how far behind each is.
CREATE INDEX log_group_partition ON log_group (partition_id);

-- Records that a group could not read, kept whole for an operator before they are acked.
CREATE TABLE quarantined_record (
    -- The order in which they came; what pages of them are cut by.
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    group_name  TEXT NOT NULL,
    topic       TEXT NOT NULL,
    partition   INTEGER NOT NULL,
    "offset"    INTEGER NOT NULL,
    key         TEXT NOT NULL,
    value       BLOB NOT NULL,
    -- As in log_record.
    headers     TEXT,
    -- Why it could not be read, in words for the operator.
    reason      TEXT NOT NULL,
    created_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
    -- A record that is read twice before its ack is quarantined once.
    UNIQUE (group_name, topic, partition, "offset")
);

-- How many records are in quarantine, kept by the triggers below: counting them would read them all.
CREATE TABLE quarantine_depth (
    only    INTEGER PRIMARY KEY CHECK (only = 1),
    records INTEGER NOT NULL
);
INSERT INTO quarantine_depth (only, records) VALUES (1, 0);
CREATE TRIGGER quarantined_record_inserted AFTER INSERT ON quarantined_record BEGIN
    UPDATE quarantine_depth SET records = records + 1;
END;
CREATE TRIGGER quarantined_record_deleted AFTER DELETE ON quarantined_record BEGIN
    UPDATE quarantine_depth SET records = records - 1;
END;

-- Which event type owns which topic. Written in the transaction that inserts the first outbox row of a type, so that a
-- restart cannot give the topic to another type.
CREATE TABLE channel (
    -- The event type with '_' for every '.': Kafka does not tell the two apart in the name of a topic. An ingest looks a
    -- type up by it, and the key keeps two types from owning one topic.
    topic_key  TEXT PRIMARY KEY,
    -- The owner. A start reads all of them and opens their channels.
    event_type TEXT NOT NULL,
    -- Milliseconds since 1970 of the database's clock, for operators.
    created_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER))
) WITHOUT ROWID;

-- What a readiness check inserts and deletes again, to know that the database takes writes. Empty at any other time.
CREATE TABLE write_probe (
    -- As large as the write that failed last, so that the insert needs as much room.
    filler BLOB NOT NULL
);

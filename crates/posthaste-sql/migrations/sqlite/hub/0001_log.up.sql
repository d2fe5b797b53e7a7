-- The built-in bus: topics of partitions, each a sequence of records numbered without gaps.
-- An append adds to next_offset and inserts its records in one transaction, so offsets become visible in order.
CREATE TABLE log_partition (
    -- Records and groups refer to this id, because it is shorter than a name in every row.
    id          INTEGER PRIMARY KEY,
    topic       TEXT NOT NULL,
    -- From 0. A topic keeps the number of partitions that it was created with: otherwise routes would change partition.
    partition   INTEGER NOT NULL,
    -- The offset of the next record. Appends allocate their offsets from it, and the backlog is measured by it.
    next_offset INTEGER NOT NULL DEFAULT 0,
    -- Finds the partitions of a topic at its first publish, and ensures that each is created only once.
    UNIQUE (topic, partition)
);

-- A table with rowids, to which records are appended at its end. WITHOUT ROWID would save one index, but such a table
-- keeps at most a quarter of a page of a row beside its key, and the rest of the usual value would go to a page of its
-- own.
CREATE TABLE log_record (
    partition_id INTEGER NOT NULL REFERENCES log_partition (id),
    "offset"     INTEGER NOT NULL,
    -- Milliseconds since 1970 of the database's clock. Shown beside an event, and used by retention.
    created_at   INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER)),
    -- The event id.
    key          TEXT NOT NULL,
    -- A JSON array of [name, value] pairs; NULL where there are none.
    headers      TEXT,
    -- Last, so that no other column is stored after the overflow pages of a large value.
    value        BLOB NOT NULL
);

-- A fetch: a range of one partition, in order. It also ensures that no offset is given twice.
CREATE UNIQUE INDEX log_record_place ON log_record (partition_id, "offset");
-- All records of one event id: "where did this event go".
CREATE INDEX log_record_key ON log_record (key);

-- The progress of each group in each partition, and which of its consumers reads it now.
CREATE TABLE log_group (
    group_name   TEXT NOT NULL,
    partition_id INTEGER NOT NULL REFERENCES log_partition (id),
    -- The lowest offset that is not done.
    watermark    INTEGER NOT NULL,
    -- The offsets that are done above the watermark, as runs of "distance+length".
    completed    TEXT NOT NULL DEFAULT '',
    -- The consumer that has the lease; NULL: none.
    owner        TEXT,
    -- Rises with each owner: fences off acks of earlier owners.
    generation   INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since 1970 of the database's clock. After that, any consumer may acquire the partition.
    leased_until INTEGER NOT NULL DEFAULT 0,
    -- An ack, and the acquisition of all free partitions of one group.
    PRIMARY KEY (group_name, partition_id)
) WITHOUT ROWID;

-- All groups of one partition: which of them have done a record, and how far each lags.
CREATE INDEX log_group_partition ON log_group (partition_id);

-- The consumers of each group. The partitions are distributed over those that are alive.
CREATE TABLE log_member (
    group_name  TEXT NOT NULL,
    -- Identifies the consumer. It is new at each start.
    owner       TEXT NOT NULL,
    -- Milliseconds since 1970 of the database's clock. After that the consumer counts as gone.
    alive_until INTEGER NOT NULL,
    -- The members of one group, and the rank of one of them.
    PRIMARY KEY (group_name, owner)
) WITHOUT ROWID;

-- Records that a group could not read, kept whole for an operator before they are acked. The values are in
-- quarantined_value, because SQLite writes a whole row for every change.
CREATE TABLE quarantined_record (
    -- A UUID of version 7. Ids rise in the order in which the records were quarantined.
    id            TEXT PRIMARY KEY,
    group_name    TEXT NOT NULL,
    topic         TEXT NOT NULL,
    partition     INTEGER NOT NULL,
    "offset"      INTEGER NOT NULL,
    -- A hash of key and value: a topic that was deleted and created again has other records at the same offsets.
    fingerprint   INTEGER NOT NULL DEFAULT 0,
    key           TEXT NOT NULL,
    -- As in log_record.
    headers       TEXT,
    -- Why it could not be read, in words for the operator.
    reason        TEXT NOT NULL,
    -- 0: QUARANTINED, 1: REPLAYED, 2: DISCARDED.
    status        INTEGER NOT NULL DEFAULT 0 CHECK (status IN (0, 1, 2)),
    -- Why it was discarded, or why its last replay failed.
    status_reason TEXT,
    -- False if the bus itself could not read it: it cannot be published as it was.
    replayable    INTEGER NOT NULL,
    -- The replay that publishes it now, and until when no other replay may. NULL: none does.
    claim_id      TEXT,
    claimed_until INTEGER,
    -- Milliseconds since 1970 of the database's clock.
    created_at    INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    updated_at    INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    -- A record that is read twice before its ack is quarantined once.
    UNIQUE (group_name, topic, partition, "offset", fingerprint)
);

-- The list of one status, newest first: all of it, of one group, and of one topic. A topic is read by one group as a
-- rule, so the last index also serves a filter by both.
CREATE INDEX quarantined_record_list ON quarantined_record (status, created_at, id);
CREATE INDEX quarantined_record_list_of_group ON quarantined_record (status, group_name, created_at, id);
CREATE INDEX quarantined_record_list_of_topic ON quarantined_record (status, topic, created_at, id);

-- The value of each quarantined record.
CREATE TABLE quarantined_value (
    record_id TEXT PRIMARY KEY REFERENCES quarantined_record (id) ON DELETE CASCADE,
    value     BLOB NOT NULL
);

-- How many records have the status QUARANTINED, kept by the triggers below: counting them would read them all.
CREATE TABLE quarantine_depth (
    group_name TEXT NOT NULL,
    topic      TEXT NOT NULL,
    records    INTEGER NOT NULL,
    PRIMARY KEY (group_name, topic)
) WITHOUT ROWID;
CREATE TRIGGER quarantined_record_inserted AFTER INSERT ON quarantined_record BEGIN
    INSERT INTO quarantine_depth (group_name, topic, records) VALUES (NEW.group_name, NEW.topic, NEW.status = 0)
        ON CONFLICT (group_name, topic) DO UPDATE SET records = records + excluded.records;
END;
CREATE TRIGGER quarantined_record_moved AFTER UPDATE OF status ON quarantined_record WHEN OLD.status <> NEW.status BEGIN
    UPDATE quarantine_depth SET records = records + (NEW.status = 0) - (OLD.status = 0)
        WHERE group_name = NEW.group_name AND topic = NEW.topic;
END;
CREATE TRIGGER quarantined_record_deleted AFTER DELETE ON quarantined_record BEGIN
    UPDATE quarantine_depth SET records = records - (OLD.status = 0)
        WHERE group_name = OLD.group_name AND topic = OLD.topic;
END;

-- Which event type owns which topic. Written in the transaction that inserts the first outbox row of a type, so that a
-- restart cannot give the topic to another type.
CREATE TABLE channel (
    -- The event type with '_' for every '.', because Kafka does not distinguish the two in the name of a topic. An
    -- ingest looks a type up by it, and the key keeps two types from owning one topic.
    topic_key  TEXT PRIMARY KEY,
    -- The owner. A start reads all of them and opens their channels.
    event_type TEXT NOT NULL,
    -- Milliseconds since 1970 of the database's clock, for operators.
    created_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000 AS INTEGER))
) WITHOUT ROWID;

-- A readiness check inserts a row and deletes it again, to find out that the database accepts writes. Empty at any
-- other time.
CREATE TABLE write_probe (
    -- As large as the write that failed last, so that the insert needs as much room.
    filler BLOB NOT NULL
);

-- The built-in bus: topics of partitions, each a sequence of records numbered without gaps.
-- An append locks its partitions in the order of their ids, adds to next_offset and inserts its records in one
-- transaction. The next append to a partition waits for the end of that transaction, so offsets become visible in
-- order.
CREATE TABLE log_partition (
    -- Records and groups refer to this id, because it is shorter than a name in every row.
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- COLLATE "C": compared as bytes, which is fast and outlives every upgrade of the system's collations.
    topic       text COLLATE "C" NOT NULL,
    -- From 0. A topic keeps the number of partitions that it was created with: otherwise routes would change partition.
    partition   integer NOT NULL CHECK (partition >= 0),
    -- The offset of the next record. Appends allocate their offsets from it, the backlog is measured by it, and the sum
    -- of all tells a consumer whether anything was appended. It is in no index, so that an append changes none.
    next_offset bigint NOT NULL DEFAULT 0,
    -- Finds the partitions of a topic at its first publish, and ensures that each is created only once.
    UNIQUE (topic, partition)
) WITH (
    -- Every append leaves a dead version of the row of each partition. Room on the page keeps the versions of a row on
    -- it, where the next reader removes the dead ones.
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_threshold = 1000
);

CREATE TABLE log_record (
    -- The id of a row of log_partition. No foreign key: an append updates that row first, and fails if it is missing. A
    -- foreign key would look it up again for every record.
    partition_id bigint NOT NULL,
    "offset"     bigint NOT NULL,
    -- The database's clock. clock_timestamp() and not now(): an append may wait for others, and the times of a
    -- partition rise with its offsets. Shown beside an event, and used by retention.
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The event id.
    key          text COLLATE "C" NOT NULL,
    -- A JSON array of [name, value] pairs; NULL where there are none. Neither json nor jsonb, so that it is kept
    -- verbatim and may contain U+0000 as an escape.
    headers      text,
    value        bytea NOT NULL,
    -- A fetch: a range of one partition, in order. It also ensures that no offset is given twice.
    PRIMARY KEY (partition_id, "offset")
) WITH (
    -- Records are only inserted, and vacuum lets index scans skip the table. So it runs after a twentieth of a large
    -- table and not after a fifth.
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05
);

-- All records of one event id, oldest first: "where did this event go". Only the beginning of the key, because an index
-- cannot hold a text of any length.
CREATE INDEX log_record_key ON log_record (left(key, 255), created_at);

-- The progress of each group in each partition, and which of its consumers reads it now.
CREATE TABLE log_group (
    group_name   text COLLATE "C" NOT NULL,
    partition_id bigint NOT NULL REFERENCES log_partition (id),
    -- The lowest offset that is not done.
    watermark    bigint NOT NULL,
    -- The offsets that are done above the watermark, as runs of "distance+length".
    completed    text NOT NULL DEFAULT '',
    -- The consumer that has the lease; NULL: none.
    owner        text COLLATE "C",
    -- Rises with each owner: fences off acks of earlier owners.
    generation   bigint NOT NULL DEFAULT 0,
    -- By the database's clock. After that, any consumer may acquire the partition. NULL: no consumer has it.
    leased_until timestamptz,
    CHECK ((owner IS NULL) = (leased_until IS NULL)),
    -- An ack, and the acquisition of all free partitions of one group.
    PRIMARY KEY (group_name, partition_id)
) WITH (
    -- As for log_partition: every ack leaves a dead version of the row, and changes no indexed column.
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_threshold = 1000
);

-- All groups of one partition: which of them have done a record, and how far each lags.
CREATE INDEX log_group_partition ON log_group (partition_id);

-- The consumers of each group. The partitions are distributed over those that are alive.
CREATE TABLE log_member (
    group_name  text COLLATE "C" NOT NULL,
    -- Identifies the consumer. It is new at each start.
    owner       text COLLATE "C" NOT NULL,
    -- By the database's clock. After that the consumer counts as gone.
    alive_until timestamptz NOT NULL,
    -- The members of one group, and the rank of one of them.
    PRIMARY KEY (group_name, owner)
);

-- Records that a group could not read, kept whole for an operator before they are acked.
CREATE TABLE quarantined_record (
    -- Lists are paged by it, in about the order in which the records were quarantined.
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_name  text COLLATE "C" NOT NULL,
    topic       text COLLATE "C" NOT NULL,
    partition   bigint NOT NULL,
    "offset"    bigint NOT NULL,
    -- With U+FFFD for every U+0000, which PostgreSQL cannot store in a text.
    key         text NOT NULL,
    value       bytea NOT NULL,
    -- As in log_record.
    headers     text,
    -- Why it could not be read, in words for the operator.
    reason      text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- A record that is read twice before its ack is quarantined once.
    UNIQUE (group_name, topic, partition, "offset")
);

-- How many records are in quarantine, kept by the triggers below: counting them would read them all.
CREATE TABLE quarantine_depth (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    records bigint NOT NULL
);
INSERT INTO quarantine_depth (records) VALUES (0);

-- It updates nothing if no row changed. So quarantining a known record again waits for no other consumer.
CREATE FUNCTION quarantined_record_counted() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    change bigint := (SELECT count(*) FROM changed);
BEGIN
    IF change > 0 THEN
        UPDATE quarantine_depth SET records = records + CASE TG_OP WHEN 'INSERT' THEN change ELSE -change END;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER quarantined_record_inserted AFTER INSERT ON quarantined_record
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted();
CREATE TRIGGER quarantined_record_deleted AFTER DELETE ON quarantined_record
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted();

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

-- Assigns offsets and inserts records: the partitions and how many records each gets, and of each record its partition,
-- its number among the records of that partition, key, headers and value.
--
-- The partitions are locked in the order of their ids, so that two appends never wait for each other. That is a
-- statement of its own: the UPDATE after it has a new snapshot, which contains what the previous append has committed. In
-- one statement, the UPDATE would begin at an old version of the row and could wait for an append that waits for it.
--
-- A partition that does not exist makes the offset NULL, which the table refuses: nothing is appended.
CREATE FUNCTION log_append(
    partitions bigint[], counts bigint[],
    partition_ids bigint[], places bigint[], keys text[], all_headers text[], record_values bytea[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM log_partition WHERE id = ANY (partitions) ORDER BY id FOR NO KEY UPDATE;
    WITH assigned AS (
        UPDATE log_partition SET next_offset = next_offset + append.count
        FROM unnest(partitions, counts) AS append (id, count)
        WHERE log_partition.id = append.id
        RETURNING log_partition.id, next_offset - append.count AS first_offset
    )
    INSERT INTO log_record (partition_id, "offset", key, headers, value)
    SELECT record.partition_id, (SELECT first_offset FROM assigned WHERE id = record.partition_id) + record.place,
        record.key, record.headers, record.value
    FROM unnest(partition_ids, places, keys, all_headers, record_values)
        AS record (partition_id, place, key, headers, value);
END $$;

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
    -- A UUID of version 7, as text. Ids of one process rise in the order in which the records were quarantined.
    id            text COLLATE "C" PRIMARY KEY,
    group_name    text COLLATE "C" NOT NULL,
    topic         text COLLATE "C" NOT NULL,
    partition     bigint NOT NULL,
    "offset"      bigint NOT NULL,
    -- A hash of key and value: a topic that was deleted and created again has other records at the same offsets.
    fingerprint   bigint NOT NULL DEFAULT 0,
    -- With U+FFFD for every U+0000, which PostgreSQL cannot store in a text.
    key           text NOT NULL,
    value         bytea NOT NULL,
    -- As in log_record.
    headers       text,
    -- Why it could not be read, in words for the operator.
    reason        text NOT NULL,
    -- 0: QUARANTINED, 1: REPLAYED, 2: DISCARDED.
    status        smallint NOT NULL DEFAULT 0 CHECK (status IN (0, 1, 2)),
    -- Why it was discarded, or why its last replay failed.
    status_reason text,
    -- False if the bus itself could not read it, or its key is not stored as it was: it cannot be published as it was.
    replayable    boolean NOT NULL,
    -- The replay that publishes it now, and until when no other replay may. NULL: none does.
    claim_id      text,
    claimed_until timestamptz,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- A record that is read twice before its ack is quarantined once.
    UNIQUE (group_name, topic, partition, "offset", fingerprint)
);

-- The list of one status, newest first: all of it, of one group, and of one topic. A topic is read by one group as a
-- rule, so the last index also serves a filter by both.
CREATE INDEX quarantined_record_list ON quarantined_record (status, created_at, id);
CREATE INDEX quarantined_record_list_of_group ON quarantined_record (status, group_name, created_at, id);
CREATE INDEX quarantined_record_list_of_topic ON quarantined_record (status, topic, created_at, id);

-- How many records have the status QUARANTINED, kept by the triggers below: counting them would read them all.
CREATE TABLE quarantine_depth (
    group_name text COLLATE "C" NOT NULL,
    topic      text COLLATE "C" NOT NULL,
    records    bigint NOT NULL,
    PRIMARY KEY (group_name, topic)
);

-- Adds or subtracts the changed rows that are in quarantine, as the argument of the trigger says. It changes nothing if
-- there are none. So quarantining a known record again waits for no other consumer. The rows are in the order of the
-- key, so that two statements never wait for each other.
CREATE FUNCTION quarantined_record_counted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quarantine_depth AS depth (group_name, topic, records)
    SELECT group_name, topic, count(*) * TG_ARGV[0]::bigint FROM changed WHERE status = 0
    GROUP BY group_name, topic ORDER BY group_name, topic
    ON CONFLICT (group_name, topic) DO UPDATE SET records = depth.records + excluded.records;
    RETURN NULL;
END $$;
CREATE TRIGGER quarantined_record_inserted AFTER INSERT ON quarantined_record
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted('1');
CREATE TRIGGER quarantined_record_before_update AFTER UPDATE ON quarantined_record
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted('-1');
CREATE TRIGGER quarantined_record_updated AFTER UPDATE ON quarantined_record
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted('1');
CREATE TRIGGER quarantined_record_deleted AFTER DELETE ON quarantined_record
    REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION quarantined_record_counted('-1');

-- The event types that have a topic.
CREATE TABLE channel (
    -- The event type with '_' for every '.', because Kafka does not distinguish the two in the name of a topic. An ingest
    -- looks a type up by it, and the key keeps two types from owning one topic.
    topic_key  text COLLATE "C" PRIMARY KEY,
    -- The owner. A start reads all of them and opens their channels.
    event_type text COLLATE "C" NOT NULL,
    -- The database's clock, for operators.
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A readiness check inserts a row and deletes it again, to find out that the database accepts writes. Empty at any other
-- time.
CREATE TABLE write_probe (
    -- As large as the write that failed last, so that the insert needs as much room. Not compressed for the same reason.
    filler bytea NOT NULL
);
ALTER TABLE write_probe ALTER COLUMN filler SET STORAGE EXTERNAL;

-- The outbox table. Other programs insert into it and operators query it: its columns are a public contract.
-- A plain INSERT with event_type and payload is enough; every other column has a default or may be absent.
CREATE TABLE {table} (
    -- Insertion order. Wall clocks do not order events.
    seq            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- COLLATE "C": compared as bytes, which is fast and outlives every upgrade of the system's collations.
    event_id       varchar(128) COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text UNIQUE CHECK (event_id <> ''),
    event_type     text COLLATE "C" NOT NULL CHECK (event_type <> ''),
    aggregate_type text COLLATE "C" NOT NULL DEFAULT '__GLOBAL__',
    aggregate_id   text COLLATE "C",
    tenant_id      text,
    -- The hub matches subscriptions on these columns.
    source_service text,
    resource_type  text,
    operation_type text,
    -- Text is kept verbatim, so it is neither json nor jsonb; binary payloads have a column of their own.
    payload        text,
    payload_bytes  bytea,
    -- True if payload_bytes holds a text in UTF-8 with the character U+0000, which PostgreSQL cannot store in a text.
    -- It is delivered as text.
    payload_is_text boolean,
    content_type   text,
    -- A JSON object of texts, in the order in which its writer gave them.
    headers        text,
    -- 0 NEW, 1 DONE, 2 RETRY, 3 DEAD
    status         smallint NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 3),
    attempts       integer NOT NULL DEFAULT 0,
    -- Times of the database's clock, except occurred_at, which is the writer's. clock_timestamp() and not now(): the
    -- time of the INSERT and not of the beginning of its transaction.
    available_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    occurred_at    timestamptz,
    done_at        timestamptz,
    last_error     text,
    -- The id of the claim that has leased the row, and when the lease began.
    locked_by      text,
    locked_at      timestamptz,
    -- How many leases of this row have expired since an attempt last ended.
    lease_losses   smallint NOT NULL DEFAULT 0,
    -- Ordered mode: an unfinished row of the same aggregate precedes this row, so claims do not read it.
    blocked        boolean NOT NULL DEFAULT false,
    CHECK ((payload IS NULL) <> (payload_bytes IS NULL)),
    -- The limits of the events that we write: an index of every database can hold texts of this length.
    CONSTRAINT {table}_lengths CHECK (
        length(event_type) <= 255
        AND length(aggregate_type) <= 255
        AND length(aggregate_id) <= 255
        AND length(tenant_id) <= 255
        AND length(source_service) <= 255
        AND length(resource_type) <= 255
        AND length(operation_type) <= 255
        AND length(content_type) <= 255),
    -- Most languages cannot read an infinite time or a year above 9999, so such times are refused here.
    CHECK (available_at >= '0001-01-01 00:00:00+00' AND available_at < '10000-01-01 00:00:00+00'),
    CHECK (created_at >= '0001-01-01 00:00:00+00' AND created_at < '10000-01-01 00:00:00+00'),
    CHECK (occurred_at >= '0001-01-01 00:00:00+00' AND occurred_at < '10000-01-01 00:00:00+00'),
    CHECK (done_at >= '0001-01-01 00:00:00+00' AND done_at < '10000-01-01 00:00:00+00')
) WITH (
    -- Leaves room on each page for a second version of its rows. A lease changes no indexed column, so the leased
    -- version on the same page needs no index entries (1.5 times the events per second of a full page). The done
    -- version fills the page again.
    fillfactor = 50,
    -- Every event leaves one or two dead row versions, and every claim has to skip the dead index entries at the head
    -- of the queue. So vacuum runs after thousands of rows, not after a fifth of a table that keeps its done rows.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02
);

-- The dispatcher's claim: pending rows in the order of delivery, and nothing else.
CREATE INDEX {table}_pending ON {table} (available_at, seq) WHERE status IN (0, 2);
-- A channel's claim: the same for one event type.
CREATE INDEX {table}_pending_of_type ON {table} (event_type, available_at, seq) WHERE status IN (0, 2);
-- Dead events, oldest first.
CREATE INDEX {table}_dead ON {table} (seq) WHERE status = 3;

-- One row: the settings that all processes that read the table share, registered at the first start, and in single-node
-- mode the process that owns the table now. In that mode claims are made in the memory of the owner, and the generation
-- fences off settlements of earlier owners.
CREATE TABLE {table}_owner (
    one_row      boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    reader       text NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         text NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    -- The length of a lease in milliseconds. A process with another lease is refused when it starts. NULL: the next
    -- start registers its own.
    lease_ms     bigint CHECK (lease_ms > 0),
    -- Ordered mode: the rule for events after a dead one. A process with another rule is refused when it starts. NULL:
    -- as above.
    dead_head    text CHECK (dead_head IN ('block', 'skip')),
    owner        text,
    generation   bigint NOT NULL DEFAULT 0,
    leased_until timestamptz NOT NULL DEFAULT clock_timestamp()
);

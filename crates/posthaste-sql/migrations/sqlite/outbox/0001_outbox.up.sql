-- The outbox table. Other programs insert into it and operators query it: its columns are a public contract.
-- A plain INSERT with event_type and payload is enough; every other column has a default or may be absent.
CREATE TABLE {table} (
    -- Insertion order. Wall clocks do not order events. AUTOINCREMENT: a number is never used again after a purge.
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id       TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))) UNIQUE CHECK (length(event_id) BETWEEN 1 AND 128),
    -- A BLOB would equal no text: no channel could ever claim its row.
    event_type     TEXT NOT NULL CHECK (event_type <> '') CHECK (typeof(event_type) = 'text'),
    aggregate_type TEXT NOT NULL DEFAULT '__GLOBAL__',
    aggregate_id   TEXT,
    tenant_id      TEXT,
    -- What the hub matches subscriptions on.
    source_service TEXT,
    resource_type  TEXT,
    operation_type TEXT,
    content_type   TEXT,
    -- 0 NEW, 1 DONE, 2 RETRY, 3 DEAD
    status         INTEGER NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 3),
    attempts       INTEGER NOT NULL DEFAULT 0,
    -- Times are RFC 3339 text. The database's clock, but for occurred_at, which is the writer's.
    available_at   TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')) CHECK (julianday(available_at) IS NOT NULL),
    created_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    occurred_at    TEXT,
    done_at        TEXT,
    last_error     TEXT,
    -- Which claim of which process has leased the row, and since when.
    locked_by      TEXT,
    locked_at      TEXT,
    -- How often a claim of this row ended by expiry since an attempt last came to an end.
    lease_losses   INTEGER NOT NULL DEFAULT 0,
    -- Ordered mode: waits for an unfinished row of its aggregate before it, so claims need not look at it.
    parked         INTEGER NOT NULL DEFAULT 0 CHECK (parked IN (0, 1)),
    -- available_at in milliseconds, whatever offset or precision its text has: what the poller compares and sorts by.
    due            INTEGER GENERATED ALWAYS AS (CAST(round((julianday(available_at) - 2440587.5) * 86400000) AS INTEGER)) VIRTUAL,
    -- A JSON object of texts.
    headers        TEXT,
    -- Text is kept verbatim; binary payloads have a column of their own. Both last, so that nothing else of a row lies
    -- behind the pages of a large one.
    payload        TEXT,
    payload_bytes  BLOB,
    CHECK ((payload IS NULL) <> (payload_bytes IS NULL))
);

-- The dispatcher's claim: pending rows in the order of reading, and nothing else.
CREATE INDEX {table}_pending ON {table} (due, seq) WHERE status IN (0, 2);
-- A channel's claim: the same for one event type.
CREATE INDEX {table}_pending_of_type ON {table} (event_type, due, seq) WHERE status IN (0, 2);
-- Dead events, oldest first.
CREATE INDEX {table}_dead ON {table} (seq) WHERE status = 3;

-- One row: which kind of reader the table has, in which mode, and in single-node mode which process reads it now.
-- There claims are made in that process's memory; the generation fences what an earlier owner still wants to record.
CREATE TABLE {table}_owner (
    only         INTEGER PRIMARY KEY CHECK (only = 1),
    reader       TEXT NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         TEXT NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    owner        TEXT,
    generation   INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since 1970 of the database's clock.
    leased_until INTEGER NOT NULL DEFAULT 0
);

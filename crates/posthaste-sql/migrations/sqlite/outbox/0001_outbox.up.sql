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
    -- Times are texts in UTC, or with an offset: RFC 3339 is what we write, every form of SQLite's with a date in it and
    -- Unix seconds are what we read. The database's clock, but for occurred_at, which is the writer's.
    available_at   TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
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
    blocked         INTEGER NOT NULL DEFAULT 0 CHECK (blocked IN (0, 1)),
    -- available_at in milliseconds, whatever form, offset or precision it has: what the poller compares and sorts by.
    -- Up to 5373484.5 a number is a Julian day, above that it is Unix seconds, as in SQLite's modifier 'auto', which older
    -- programs do not know.
    due            INTEGER GENERATED ALWAYS AS (
                       CAST(round(CASE
                       WHEN available_at GLOB '[0-9][0-9][0-9][0-9]-*' THEN (julianday(available_at) - 2440587.5) * 86400000
                       WHEN available_at GLOB '*[^0-9.]*' THEN NULL
                       WHEN CAST(available_at AS REAL) < 5373485 THEN (CAST(available_at AS REAL) - 2440587.5) * 86400000
                       ELSE CAST(available_at AS REAL) * 1000 END) AS INTEGER)) VIRTUAL,
    -- A JSON object of texts.
    headers        TEXT,
    -- Text is kept verbatim; binary payloads have a column of their own, but a BLOB in the column for texts is as good.
    -- Both last, so that nothing else of a row lies behind the pages of a large one.
    payload        TEXT,
    payload_bytes  BLOB,
    CHECK ((payload IS NULL) <> (payload_bytes IS NULL)),
    -- As long as our own events may be: an index of every database can hold them.
    CONSTRAINT {table}_lengths CHECK (
        length(event_type) <= 255
        AND length(aggregate_type) <= 255
        AND length(aggregate_id) <= 255
        AND length(tenant_id) <= 255
        AND length(source_service) <= 255
        AND length(resource_type) <= 255
        AND length(operation_type) <= 255
        AND length(content_type) <= 255),
    -- What nobody could read as a time is refused, and not taken for now or for never. The years are 1 to 9999.
    CONSTRAINT {table}_available_at CHECK (
        typeof(available_at) = 'text' AND coalesce(due BETWEEN -62135596800000 AND 253402300799999, 0)),
    CONSTRAINT {table}_created_at CHECK (typeof(created_at) = 'text' AND coalesce(
        CAST(round(CASE
            WHEN created_at GLOB '[0-9][0-9][0-9][0-9]-*' THEN (julianday(created_at) - 2440587.5) * 86400000
            WHEN created_at GLOB '*[^0-9.]*' THEN NULL
            WHEN CAST(created_at AS REAL) < 5373485 THEN (CAST(created_at AS REAL) - 2440587.5) * 86400000
            ELSE CAST(created_at AS REAL) * 1000 END) AS INTEGER)
        BETWEEN -62135596800000 AND 253402300799999, 0)),
    CONSTRAINT {table}_occurred_at CHECK (occurred_at IS NULL OR typeof(occurred_at) = 'text' AND coalesce(
        CAST(round(CASE
            WHEN occurred_at GLOB '[0-9][0-9][0-9][0-9]-*' THEN (julianday(occurred_at) - 2440587.5) * 86400000
            WHEN occurred_at GLOB '*[^0-9.]*' THEN NULL
            WHEN CAST(occurred_at AS REAL) < 5373485 THEN (CAST(occurred_at AS REAL) - 2440587.5) * 86400000
            ELSE CAST(occurred_at AS REAL) * 1000 END) AS INTEGER)
        BETWEEN -62135596800000 AND 253402300799999, 0))
);

-- The dispatcher's claim: pending rows in the order of reading, and nothing else.
CREATE INDEX {table}_pending ON {table} (due, seq) WHERE status IN (0, 2);
-- A channel's claim: the same for one event type.
CREATE INDEX {table}_pending_of_type ON {table} (event_type, due, seq) WHERE status IN (0, 2);
-- Dead events, oldest first.
CREATE INDEX {table}_dead ON {table} (seq) WHERE status = 3;

-- One row: what all processes that read the table agreed on at the first start, and in single-node mode which process reads
-- it now. There claims are made in that process's memory; the generation fences what an earlier owner still wants to record.
CREATE TABLE {table}_owner (
    only         INTEGER PRIMARY KEY CHECK (only = 1),
    reader       TEXT NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         TEXT NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    -- How long a claim holds, in milliseconds: a start with another lease is refused. NULL: the next start records its own.
    lease_ms     INTEGER CHECK (lease_ms > 0),
    -- Ordered mode, what becomes of events behind a dead one: a start with another rule is refused. NULL: as above.
    dead_head    TEXT CHECK (dead_head IN ('block', 'skip')),
    owner        TEXT,
    generation   INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since 1970 of the database's clock.
    leased_until INTEGER NOT NULL DEFAULT 0
);

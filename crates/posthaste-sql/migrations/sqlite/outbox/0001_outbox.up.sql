-- The outbox table. Other programs insert into it and operators query it: its columns are a public contract.
-- A plain INSERT with event_type and payload is enough; every other column has a default or may be absent.
CREATE TABLE {table} (
    -- Insertion order. Wall clocks do not order events. AUTOINCREMENT: a number is never used again after a purge.
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id       TEXT NOT NULL DEFAULT (lower(hex(randomblob(16)))) UNIQUE CHECK (length(event_id) BETWEEN 1 AND 128),
    -- A BLOB equals no text, so no channel could ever claim its row.
    event_type     TEXT NOT NULL CHECK (event_type <> '') CHECK (typeof(event_type) = 'text'),
    aggregate_type TEXT NOT NULL DEFAULT '__GLOBAL__',
    aggregate_id   TEXT,
    tenant_id      TEXT,
    -- The hub matches subscriptions on these columns.
    source_service TEXT,
    resource_type  TEXT,
    operation_type TEXT,
    content_type   TEXT,
    -- 0 NEW, 1 DONE, 2 RETRY, 3 DEAD
    status         INTEGER NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 3),
    attempts       INTEGER NOT NULL DEFAULT 0,
    -- Times are texts in UTC or with an offset. We write RFC 3339. We read every form of SQLite that has a date, and
    -- Unix seconds. They are of the database's clock, except occurred_at, which is the writer's.
    available_at   TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    created_at     TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    occurred_at    TEXT,
    done_at        TEXT,
    last_error     TEXT,
    -- The id of the claim that has leased the row, and when the lease began.
    locked_by      TEXT,
    locked_at      TEXT,
    -- How many leases of this row have expired since an attempt last ended.
    lease_losses   INTEGER NOT NULL DEFAULT 0,
    -- Ordered mode: an unfinished row of the same aggregate precedes this row, so claims do not read it.
    blocked        INTEGER NOT NULL DEFAULT 0 CHECK (blocked IN (0, 1)),
    -- available_at in milliseconds, whatever form, offset or precision it has. Claims compare and sort by it. Up to
    -- 5373484.5 a number is a Julian day, above that it is Unix seconds, as in SQLite's modifier 'auto', which older
    -- programs do not know.
    due            INTEGER GENERATED ALWAYS AS (
                       CAST(round(CASE
                       WHEN available_at GLOB '[0-9][0-9][0-9][0-9]-*' THEN (julianday(available_at) - 2440587.5) * 86400000
                       WHEN available_at GLOB '*[^0-9.]*' THEN NULL
                       WHEN CAST(available_at AS REAL) < 5373485 THEN (CAST(available_at AS REAL) - 2440587.5) * 86400000
                       ELSE CAST(available_at AS REAL) * 1000 END) AS INTEGER)) VIRTUAL,
    -- A JSON object of texts.
    headers        TEXT,
    -- Text is kept verbatim. Binary payloads have a column of their own, but a BLOB in the column for texts is accepted
    -- too. Both columns are last, so that no other column is stored after the overflow pages of a large payload.
    payload        TEXT,
    payload_bytes  BLOB,
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
    -- A value that cannot be read as a time is refused, and not read as now or never. The years are 1 to 9999.
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

-- The dispatcher's claim: pending rows in the order of delivery, and nothing else.
CREATE INDEX {table}_pending ON {table} (due, seq) WHERE status IN (0, 2);
-- A channel's claim: the same for one event type.
CREATE INDEX {table}_pending_of_type ON {table} (event_type, due, seq) WHERE status IN (0, 2);
-- Dead events, oldest first.
CREATE INDEX {table}_dead ON {table} (seq) WHERE status = 3;

-- One row: the settings that all processes that read the table share, registered at the first start, and in single-node
-- mode the process that owns the table now. In that mode claims are made in the memory of the owner, and the generation
-- fences off settlements of earlier owners.
CREATE TABLE {table}_owner (
    only         INTEGER PRIMARY KEY CHECK (only = 1),
    reader       TEXT NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         TEXT NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    -- The length of a lease in milliseconds. A process with another lease is refused when it starts. NULL: the next
    -- start registers its own.
    lease_ms     INTEGER CHECK (lease_ms > 0),
    -- Ordered mode: the rule for events after a dead one. A process with another rule is refused when it starts. NULL:
    -- as above.
    dead_head    TEXT CHECK (dead_head IN ('block', 'skip')),
    owner        TEXT,
    generation   INTEGER NOT NULL DEFAULT 0,
    -- Milliseconds since 1970 of the database's clock.
    leased_until INTEGER NOT NULL DEFAULT 0
);

-- The outbox table. Other programs insert into it and operators query it: its columns are a public contract.
-- A plain INSERT with event_type and payload is enough; every other column has a default or may be absent.
-- All times are in UTC, whatever the time zone of a session.
CREATE TABLE {table} (
    -- Insertion order. Wall clocks do not order events.
    seq            BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    event_id       VARCHAR(128) NOT NULL DEFAULT (UUID()) UNIQUE CHECK (event_id <> ''),
    event_type     VARCHAR(255) NOT NULL CHECK (event_type <> ''),
    aggregate_type VARCHAR(255) NOT NULL DEFAULT '__GLOBAL__',
    aggregate_id   VARCHAR(255),
    tenant_id      VARCHAR(255),
    -- The hub matches subscriptions on these columns.
    source_service VARCHAR(255),
    resource_type  VARCHAR(255),
    operation_type VARCHAR(255),
    -- Text is kept verbatim, so it is not JSON; binary payloads have a column of their own.
    payload        LONGTEXT,
    payload_bytes  LONGBLOB,
    content_type   VARCHAR(255),
    -- A JSON object of texts, in the order in which its writer gave them.
    headers        MEDIUMTEXT,
    -- 0 NEW, 1 DONE, 2 RETRY, 3 DEAD
    status         TINYINT NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 3),
    attempts       INT NOT NULL DEFAULT 0,
    -- Times of the database's clock, except occurred_at, which is the writer's.
    available_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    created_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    occurred_at    DATETIME(6),
    done_at        DATETIME(6),
    last_error     TEXT,
    -- The id of the claim that has leased the row, and when the lease began.
    locked_by      VARCHAR(255),
    locked_at      DATETIME(6),
    -- How many leases of this row have expired since an attempt last ended.
    lease_losses   SMALLINT NOT NULL DEFAULT 0,
    -- Ordered mode: an unfinished row of the same aggregate precedes this row, so claims do not read it.
    blocked        TINYINT NOT NULL DEFAULT 0 CHECK (blocked IN (0, 1)),
    -- MySQL has no partial indexes. Each of these columns leads an index instead: it is 1 for the rows of the index and
    -- NULL for all others. They are STORED, because a virtual column is computed again whenever its index is read or
    -- purged.
    pending        TINYINT AS (CASE WHEN status IN (0, 2) THEN 1 END) STORED,
    dead           TINYINT AS (CASE WHEN status = 3 THEN 1 END) STORED,
    CONSTRAINT {table}_one_payload CHECK ((payload IS NULL) <> (payload_bytes IS NULL)),
    -- In some SQL modes a session may write dates without a month or a day. They are refused here, because readers
    -- elsewhere could not read them.
    CONSTRAINT {table}_available_at CHECK (YEAR(available_at) >= 1000 AND MONTH(available_at) > 0 AND DAYOFMONTH(available_at) > 0),
    CONSTRAINT {table}_created_at CHECK (YEAR(created_at) >= 1000 AND MONTH(created_at) > 0 AND DAYOFMONTH(created_at) > 0),
    CONSTRAINT {table}_occurred_at CHECK (YEAR(occurred_at) >= 1000 AND MONTH(occurred_at) > 0 AND DAYOFMONTH(occurred_at) > 0),
    CONSTRAINT {table}_done_at CHECK (YEAR(done_at) >= 1000 AND MONTH(done_at) > 0 AND DAYOFMONTH(done_at) > 0),
    CONSTRAINT {table}_locked_at CHECK (YEAR(locked_at) >= 1000 AND MONTH(locked_at) > 0 AND DAYOFMONTH(locked_at) > 0),
    -- The dispatcher's claim: pending rows in the order of delivery.
    INDEX {table}_pending (pending, available_at, seq),
    -- A channel's claim: the same for one event type.
    INDEX {table}_pending_of_type (pending, event_type, available_at, seq),
    -- Dead events, oldest first.
    INDEX {table}_dead (dead, seq)
-- Texts are compared by their encoded characters, without folding of case or accents. utf8mb4, whatever the database's
-- default is.
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row: the settings that all processes that read the table share, registered at the first start, and in single-node
-- mode the process that owns the table now. In that mode claims are made in the memory of the owner, and the generation
-- fences off settlements of earlier owners.
CREATE TABLE {table}_owner (
    one_row      TINYINT NOT NULL DEFAULT 1 PRIMARY KEY CHECK (one_row = 1),
    reader       VARCHAR(16) NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         VARCHAR(16) NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    -- The length of a lease in milliseconds. A process with another lease is refused when it starts. NULL: the next
    -- start registers its own.
    lease_ms     BIGINT CHECK (lease_ms > 0),
    -- Ordered mode: the rule for events after a dead one. A process with another rule is refused when it starts. NULL:
    -- as above.
    dead_head    VARCHAR(16) CHECK (dead_head IN ('block', 'skip')),
    owner        VARCHAR(255),
    generation   BIGINT NOT NULL DEFAULT 0,
    leased_until DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

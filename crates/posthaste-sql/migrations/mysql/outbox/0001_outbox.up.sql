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
    -- What the hub matches subscriptions on.
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
    -- The database's clock, but for occurred_at, which is the writer's.
    available_at   DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    created_at     DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    occurred_at    DATETIME(6),
    done_at        DATETIME(6),
    last_error     TEXT,
    -- Which claim of which process has leased the row, and since when.
    locked_by      VARCHAR(255),
    locked_at      DATETIME(6),
    -- How often a claim of this row ended by expiry since an attempt last came to an end.
    lease_losses   SMALLINT NOT NULL DEFAULT 0,
    -- Ordered mode: waits for an unfinished row of its aggregate before it, so claims need not look at it.
    blocked         TINYINT NOT NULL DEFAULT 0 CHECK (blocked IN (0, 1)),
    -- There is no index of some rows only: what leads one is 1 for those and nothing for all others. They are stored,
    -- because an index of a column that is computed on the way has to be computed again by whatever reads or purges it.
    pending        TINYINT AS (CASE WHEN status IN (0, 2) THEN 1 END) STORED,
    dead           TINYINT AS (CASE WHEN status = 3 THEN 1 END) STORED,
    CONSTRAINT {table}_one_payload CHECK ((payload IS NULL) <> (payload_bytes IS NULL)),
    -- Some sessions may write dates without a month or a day: better refused here than unreadable elsewhere.
    CONSTRAINT {table}_available_at CHECK (YEAR(available_at) >= 1000 AND MONTH(available_at) > 0 AND DAYOFMONTH(available_at) > 0),
    CONSTRAINT {table}_created_at CHECK (YEAR(created_at) >= 1000 AND MONTH(created_at) > 0 AND DAYOFMONTH(created_at) > 0),
    CONSTRAINT {table}_occurred_at CHECK (YEAR(occurred_at) >= 1000 AND MONTH(occurred_at) > 0 AND DAYOFMONTH(occurred_at) > 0),
    CONSTRAINT {table}_done_at CHECK (YEAR(done_at) >= 1000 AND MONTH(done_at) > 0 AND DAYOFMONTH(done_at) > 0),
    CONSTRAINT {table}_locked_at CHECK (YEAR(locked_at) >= 1000 AND MONTH(locked_at) > 0 AND DAYOFMONTH(locked_at) > 0),
    -- The dispatcher's claim: pending rows in the order of reading.
    INDEX {table}_pending (pending, available_at, seq),
    -- A channel's claim: the same for one event type.
    INDEX {table}_pending_of_type (pending, event_type, available_at, seq),
    -- Dead events, oldest first.
    INDEX {table}_dead (dead, seq)
-- Compared as characters are encoded, so that nothing is folded; and utf8mb4 whatever the database's default is.
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- One row: what all processes that read the table agreed on at the first start, and in single-node mode which process reads
-- it now. There claims are made in that process's memory; the generation fences what an earlier owner still wants to record.
CREATE TABLE {table}_owner (
    one_row      TINYINT NOT NULL DEFAULT 1 PRIMARY KEY CHECK (one_row = 1),
    reader       VARCHAR(16) NOT NULL CHECK (reader IN ('dispatcher', 'channels')),
    mode         VARCHAR(16) NOT NULL CHECK (mode IN ('single_node', 'multi_node', 'ordered')),
    -- How long a claim holds, in milliseconds: a start with another lease is refused. NULL: the next start records its own.
    lease_ms     BIGINT CHECK (lease_ms > 0),
    -- Ordered mode, what becomes of events behind a dead one: a start with another rule is refused. NULL: as above.
    dead_head    VARCHAR(16) CHECK (dead_head IN ('block', 'skip')),
    owner        VARCHAR(255),
    generation   BIGINT NOT NULL DEFAULT 0,
    leased_until DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

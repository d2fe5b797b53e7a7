-- Deliveries whose immediate attempts are spent. Times are milliseconds of the database's clock.
CREATE TABLE dlt_event (
    -- UUID v7: rises with time, so that it also breaks ties in the order of intake.
    id              TEXT PRIMARY KEY,
    -- One delivery is one dead letter, however often its record is read.
    delivery_id     TEXT NOT NULL UNIQUE,
    event_id        TEXT NOT NULL,
    subscription_id TEXT NOT NULL,
    subscriber_id   TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    domain          TEXT NOT NULL,
    endpoint        TEXT NOT NULL,
    -- 0 NEW, 1 PROCESSED, 2 FAILED
    status          INTEGER NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 2),
    -- Scheduled retries made; replays do not count.
    retry_count     INTEGER NOT NULL DEFAULT 0,
    -- Requests ever made for this delivery: immediate, scheduled and replayed.
    attempts        INTEGER NOT NULL DEFAULT 0,
    error           TEXT NOT NULL,
    error_code      TEXT NOT NULL,
    error_cause     TEXT,
    first_failed_at INTEGER NOT NULL,
    -- 1: it has immediate attempts left. Its first scheduled attempt is not a retry.
    deferred        INTEGER NOT NULL DEFAULT 0,
    -- When its next retry is due; NULL: no retry is scheduled.
    scheduled_at    INTEGER,
    -- When a replay is due, which precedes the schedule, and the request that it belongs to.
    replay_at       INTEGER,
    replay_id       TEXT,
    -- The id of the claim that has leased it, and when the lease ends.
    locked_by       TEXT,
    locked_until    INTEGER,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    due             INTEGER GENERATED ALWAYS AS (coalesce(replay_at, scheduled_at)) VIRTUAL
);

-- The claim: the waiting dead letters of each subscription, in order. Dead letters without a retry or replay are not in
-- it.
CREATE INDEX dlt_event_waiting ON dlt_event (subscription_id, due, id) WHERE due IS NOT NULL;
-- The dead letter that has been due for longest.
CREATE INDEX dlt_event_due ON dlt_event (due, id) WHERE due IS NOT NULL;
-- A process that stops releases its leases.
CREATE INDEX dlt_event_locked ON dlt_event (locked_by) WHERE locked_by IS NOT NULL;
-- The dead letters that a replay has not delivered yet.
CREATE INDEX dlt_event_replay ON dlt_event (replay_id) WHERE replay_id IS NOT NULL;
-- The list by status, newest or oldest first, and the depth by status.
CREATE INDEX dlt_event_status_created ON dlt_event (status, created_at, id);
-- The list by status, last changed first.
CREATE INDEX dlt_event_status_updated ON dlt_event (status, updated_at, id);
-- The list of all statuses.
CREATE INDEX dlt_event_created ON dlt_event (created_at, id);
-- The list of one subscriber, usually of its failed dead letters.
CREATE INDEX dlt_event_subscriber ON dlt_event (subscriber_id, status, created_at, id);
-- The dead letters of one event.
CREATE INDEX dlt_event_event ON dlt_event (event_id);

-- The deliveries themselves, which may be large. SQLite writes a whole row for every change of it, so they are not in the
-- rows that claims and retries change.
CREATE TABLE dlt_payload (
    letter_id TEXT PRIMARY KEY REFERENCES dlt_event (id) ON DELETE CASCADE,
    -- The OutboxEvent as it was on the bus, in Protobuf.
    envelope  BLOB NOT NULL,
    -- The same for people, in JSON.
    readable  TEXT NOT NULL
);

-- Every scheduled and replayed attempt.
CREATE TABLE retry_history (
    id            INTEGER PRIMARY KEY AUTOINCREMENT,
    letter_id     TEXT NOT NULL REFERENCES dlt_event (id) ON DELETE CASCADE,
    -- NULL: it succeeded.
    error_code    TEXT,
    error_message TEXT,
    error_cause   TEXT,
    process_date  INTEGER NOT NULL,
    trigger       TEXT NOT NULL CHECK (trigger IN ('SCHEDULED', 'REPLAY')),
    -- The replay that this attempt belongs to.
    replay_id     TEXT,
    duration_ms   INTEGER NOT NULL
);

-- The history of one dead letter, and its removal together with the dead letter.
CREATE INDEX retry_history_letter ON retry_history (letter_id, id);
-- The results of one replay.
CREATE INDEX retry_history_replay ON retry_history (replay_id, letter_id, id) WHERE replay_id IS NOT NULL;

-- Requests of operators to deliver again.
CREATE TABLE replay (
    id         TEXT PRIMARY KEY,
    reason     TEXT,
    matched    INTEGER NOT NULL,
    created_at INTEGER NOT NULL
);

-- How many dead letters have each status, kept by the triggers below: counting them would read them all, and the
-- metrics are queried every few seconds.
CREATE TABLE dlt_depth (
    status  INTEGER PRIMARY KEY,
    letters INTEGER NOT NULL
);
INSERT INTO dlt_depth (status, letters) VALUES (0, 0), (1, 0), (2, 0);
CREATE TRIGGER dlt_event_inserted AFTER INSERT ON dlt_event BEGIN
    UPDATE dlt_depth SET letters = letters + 1 WHERE status = NEW.status;
END;
CREATE TRIGGER dlt_event_moved AFTER UPDATE OF status ON dlt_event WHEN OLD.status <> NEW.status BEGIN
    UPDATE dlt_depth SET letters = letters - 1 WHERE status = OLD.status;
    UPDATE dlt_depth SET letters = letters + 1 WHERE status = NEW.status;
END;
CREATE TRIGGER dlt_event_deleted AFTER DELETE ON dlt_event BEGIN
    UPDATE dlt_depth SET letters = letters - 1 WHERE status = OLD.status;
END;

-- Deliveries whose immediate attempts are spent. Times are those of the database's clock. Texts have U+FFFD for every
-- U+0000, which PostgreSQL cannot store.
CREATE TABLE dlt_event (
    -- A UUID of version 7, as text: rises with time, so that it also breaks ties in the order of intake. COLLATE "C":
    -- compared as bytes, which is fast and outlives every upgrade of the system's collations.
    id              text COLLATE "C" PRIMARY KEY,
    -- One delivery is one dead letter, however often its record is read, and by however many processes.
    delivery_id     text COLLATE "C" NOT NULL UNIQUE,
    event_id        text COLLATE "C" NOT NULL,
    subscription_id text COLLATE "C" NOT NULL,
    subscriber_id   text COLLATE "C" NOT NULL,
    event_type      text COLLATE "C" NOT NULL,
    domain          text COLLATE "C" NOT NULL,
    endpoint        text NOT NULL,
    -- 0 NEW, 1 PROCESSED, 2 FAILED
    status          smallint NOT NULL DEFAULT 0 CHECK (status BETWEEN 0 AND 2),
    -- Scheduled retries made; replays do not count.
    retry_count     integer NOT NULL DEFAULT 0 CHECK (retry_count >= 0),
    -- Requests ever made for this delivery: immediate, scheduled and replayed.
    attempts        integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    error           text NOT NULL,
    error_code      text NOT NULL,
    error_cause     text,
    first_failed_at timestamptz NOT NULL CHECK (isfinite(first_failed_at)),
    -- True: it has immediate attempts left. Its first scheduled attempt is not a retry.
    deferred        boolean NOT NULL DEFAULT false,
    -- When its next retry is due; NULL: no retry is scheduled.
    scheduled_at    timestamptz CHECK (isfinite(scheduled_at)),
    -- When a replay is due, which precedes the schedule, and the request that it belongs to.
    replay_at       timestamptz CHECK (isfinite(replay_at)),
    replay_id       text COLLATE "C",
    -- The id of the claim that has leased it, and when the lease ends. They are in no index, so that a claim and a renewal
    -- change none.
    locked_by       text COLLATE "C",
    locked_until    timestamptz,
    -- Whole milliseconds, because the cursor of a list has milliseconds.
    created_at      timestamptz NOT NULL DEFAULT date_trunc('milliseconds', clock_timestamp()) CHECK (isfinite(created_at)),
    updated_at      timestamptz NOT NULL DEFAULT date_trunc('milliseconds', clock_timestamp()) CHECK (isfinite(updated_at)),
    due             timestamptz GENERATED ALWAYS AS (coalesce(replay_at, scheduled_at)) STORED
) WITH (
    -- Room on each page for the leased version of its rows, which then needs no index entries.
    fillfactor = 60,
    -- Every retry leaves dead index entries at the head of its subscription, which every claim has to skip.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0.05
);

-- The claim: the waiting dead letters of each subscription, in order. Dead letters without a retry or replay are not in
-- it.
CREATE INDEX dlt_event_waiting ON dlt_event (subscription_id, due, id) WHERE due IS NOT NULL;
-- The dead letter that has been due for longest, and the leases of a process that stops.
CREATE INDEX dlt_event_due ON dlt_event (due, id) WHERE due IS NOT NULL;
-- The dead letters that a replay has not delivered yet.
CREATE INDEX dlt_event_replay ON dlt_event (replay_id) WHERE replay_id IS NOT NULL;
-- The list by status, newest or oldest first.
CREATE INDEX dlt_event_status_created ON dlt_event (status, created_at, id);
-- The list by status, last changed first.
CREATE INDEX dlt_event_status_updated ON dlt_event (status, updated_at, id);
-- The list of all statuses.
CREATE INDEX dlt_event_created ON dlt_event (created_at, id);
-- The list of one subscriber, usually of its failed dead letters.
CREATE INDEX dlt_event_subscriber ON dlt_event (subscriber_id, status, created_at, id);
-- The dead letters of one event, in the order of the list.
CREATE INDEX dlt_event_event ON dlt_event (event_id, created_at, id);

-- The deliveries themselves, which may be large. They are not in the rows that claims and retries change.
CREATE TABLE dlt_payload (
    letter_id text COLLATE "C" PRIMARY KEY REFERENCES dlt_event (id) ON DELETE CASCADE,
    -- The OutboxEvent as it was on the bus, in Protobuf.
    envelope  bytea NOT NULL,
    -- The same for people, in JSON. Neither json nor jsonb, so that it is kept verbatim.
    readable  text NOT NULL
);

-- Every scheduled and replayed attempt.
CREATE TABLE retry_history (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    letter_id     text COLLATE "C" NOT NULL REFERENCES dlt_event (id) ON DELETE CASCADE,
    -- NULL: it succeeded.
    error_code    text,
    error_message text,
    error_cause   text,
    process_date  timestamptz NOT NULL DEFAULT clock_timestamp(),
    trigger       text NOT NULL CHECK (trigger IN ('SCHEDULED', 'REPLAY')),
    -- The replay that this attempt belongs to.
    replay_id     text COLLATE "C",
    duration_ms   bigint NOT NULL
);

-- The history of one dead letter, and its removal together with the dead letter.
CREATE INDEX retry_history_letter ON retry_history (letter_id, id);
-- The results of one replay.
CREATE INDEX retry_history_replay ON retry_history (replay_id, letter_id, id) WHERE replay_id IS NOT NULL;

-- Requests of operators to deliver again.
CREATE TABLE replay (
    id         text COLLATE "C" PRIMARY KEY,
    reason     text,
    matched    bigint NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- How many dead letters have each status, kept by the triggers below: counting them would read them all, and the metrics
-- are queried every few seconds. The number of a status is the sum of its slots. A transaction changes the slot of its
-- connection, so that transactions seldom wait for each other; a slot by itself may be negative.
CREATE TABLE dlt_depth (
    status  smallint NOT NULL,
    slot    integer NOT NULL,
    letters bigint NOT NULL,
    PRIMARY KEY (status, slot)
) WITH (
    -- Every change leaves a dead version of the row. Room on the page keeps the versions of a row on it.
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0.1,
    autovacuum_vacuum_threshold = 1000
);
INSERT INTO dlt_depth (status, slot, letters) VALUES (0, 0, 0), (1, 0, 0), (2, 0, 0);

CREATE FUNCTION dlt_count(of_status smallint, change bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO dlt_depth AS depth (status, slot, letters) VALUES (of_status, pg_backend_pid() & 15, change)
    ON CONFLICT (status, slot) DO UPDATE SET letters = depth.letters + excluded.letters
$$;

-- Counts the changed rows of a statement. An update that changes no status, such as a claim, writes nothing. The statuses
-- are in order, so that two statements never wait for each other.
CREATE FUNCTION dlt_event_counted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        PERFORM dlt_count(status, letters) FROM (
            SELECT status, count(*) AS letters FROM inserted GROUP BY status ORDER BY status) AS counted;
    ELSIF TG_OP = 'DELETE' THEN
        PERFORM dlt_count(status, -letters) FROM (
            SELECT status, count(*) AS letters FROM deleted GROUP BY status ORDER BY status) AS counted;
    ELSE
        PERFORM dlt_count(status, letters) FROM (
            SELECT status, sum(difference)::bigint AS letters FROM (
                SELECT status, 1 AS difference FROM inserted UNION ALL SELECT status, -1 FROM deleted
            ) AS moved
            GROUP BY status HAVING sum(difference) <> 0 ORDER BY status) AS counted;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER dlt_event_inserted AFTER INSERT ON dlt_event
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION dlt_event_counted();
CREATE TRIGGER dlt_event_moved AFTER UPDATE ON dlt_event
    REFERENCING OLD TABLE AS deleted NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION dlt_event_counted();
CREATE TRIGGER dlt_event_deleted AFTER DELETE ON dlt_event
    REFERENCING OLD TABLE AS deleted FOR EACH STATEMENT EXECUTE FUNCTION dlt_event_counted();

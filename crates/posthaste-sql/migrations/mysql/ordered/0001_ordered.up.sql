-- What only ordered mode needs, so that the other modes need not maintain it.
ALTER TABLE {table}
    -- 1 for a pending row that waits for nobody, 0 for one that is blocked.
    ADD COLUMN ready      TINYINT AS (CASE WHEN status IN (0, 2) THEN 1 - blocked END) STORED,
    ADD COLUMN unfinished TINYINT AS (CASE WHEN status <> 1 AND aggregate_id IS NOT NULL THEN 1 END) STORED,
    -- The ordered claim: what is ready, in the order of reading. And the occasional look for rows that are blocked and wait
    -- for nobody any more.
    ADD INDEX {table}_ready (ready, available_at, seq),
    -- The unfinished rows of one aggregate in their order: who stands before a row, and who comes after it.
    ADD INDEX {table}_key (unfinished, aggregate_type, aggregate_id, seq, blocked);

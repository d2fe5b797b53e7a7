-- Columns and indexes that only ordered mode needs, so that the other modes need not maintain them.
ALTER TABLE {table}
    -- 1 for a pending row that is not blocked, 0 for a blocked one.
    ADD COLUMN ready      TINYINT AS (CASE WHEN status IN (0, 2) THEN 1 - blocked END) STORED,
    ADD COLUMN unfinished TINYINT AS (CASE WHEN status <> 1 AND aggregate_id IS NOT NULL THEN 1 END) STORED,
    -- The ordered claim: pending rows that are not blocked, in the order of delivery. And the sweep: finds orphans,
    -- which are blocked rows without an unfinished predecessor.
    ADD INDEX {table}_ready (ready, available_at, seq),
    -- The unfinished rows of one aggregate in their order: finds the predecessor of a row, and the rows after it.
    ADD INDEX {table}_key (unfinished, aggregate_type, aggregate_id, seq, blocked);

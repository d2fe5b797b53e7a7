-- Indexes that only ordered mode needs, so that the other modes need not maintain them.

-- The ordered claim: pending rows that are not blocked, in the order of delivery.
CREATE INDEX {table}_ready ON {table} (available_at, seq) WHERE status IN (0, 2) AND NOT blocked;
-- The unfinished rows of one aggregate in their order: finds the predecessor of a row, and the rows after it.
CREATE INDEX {table}_key ON {table} (aggregate_type, aggregate_id, seq) WHERE status <> 1 AND aggregate_id IS NOT NULL;
-- The sweep: finds orphans, which are blocked rows without an unfinished predecessor.
CREATE INDEX {table}_blocked ON {table} (seq) WHERE blocked;

-- What only ordered mode needs, so that the other modes need not maintain it.

-- The ordered claim: pending rows that wait for nobody, in the order of reading.
CREATE INDEX {table}_ready ON {table} (due, seq) WHERE status IN (0, 2) AND blocked = 0;
-- The unfinished rows of one aggregate in their order: who stands before a row, and who comes after it.
CREATE INDEX {table}_key ON {table} (aggregate_type, aggregate_id, seq) WHERE status <> 1 AND aggregate_id IS NOT NULL;
-- The occasional look for rows that wait for nobody any more.
CREATE INDEX {table}_blocked ON {table} (seq) WHERE blocked = 1;

UPDATE "outbox_event" AS row SET status = 1, done_at = statement_timestamp(), locked_by = NULL, locked_at = NULL
WHERE row.seq = ANY ($2) AND row.status NOT IN (1, 3) AND row.locked_by = ANY ($1)
RETURNING row.seq

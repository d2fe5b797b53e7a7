INSERT INTO "outbox_event" (seq, event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, available_at, locked_by, locked_at, payload_is_text) OVERRIDING SYSTEM VALUE
SELECT seq, event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type,
operation_type, payload, payload_bytes, content_type, headers, occurred_at, statement_timestamp(),
coalesce(until, statement_timestamp() + wait * interval '1 microsecond'), $16, CASE WHEN $16 IS NOT NULL THEN statement_timestamp() END,
payload_is_text
FROM (SELECT nextval(pg_get_serial_sequence('"outbox_event"', 'seq')) AS seq, event.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
    $9::text[], $10::bytea[], $11::text[], $12::text[], $13::timestamptz[], $14::timestamptz[], $15::bigint[],
    $17::boolean[])
WITH ORDINALITY AS event (event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service,
    resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, until, wait,
    payload_is_text, place) ORDER BY place)
    AS numbered
ORDER BY event_id
ON CONFLICT (event_id) DO NOTHING
RETURNING event_id

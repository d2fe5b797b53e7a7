WITH due AS MATERIALIZED (
    SELECT seq, available_at, locked_at IS NOT NULL OR lease_losses > 0 AS is_suspect,
        coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes
    FROM "outbox_event"
    WHERE status IN (0, 2) AND (event_type, available_at) <= ($9, statement_timestamp())
        AND (event_type, available_at, seq) > ($9, $3, $4) AND created_at <= statement_timestamp() - $5 * interval '1 microsecond' AND (locked_at IS NULL OR locked_at <= statement_timestamp() - $6 * interval '1 microsecond'
OR locked_at > statement_timestamp() + $6 / 10 * interval '1 microsecond')
     AND ($7 OR (locked_at IS NULL AND lease_losses = 0)) AND seq NOT IN (SELECT unnest($1::bigint[]))
    ORDER BY event_type, available_at, seq LIMIT $2
    FOR UPDATE SKIP LOCKED
), measured AS (
    SELECT seq, is_suspect, first_value(is_suspect) OVER in_order AS starts_with_suspect,
        sum(bytes) OVER in_order - bytes AS before
    FROM due WINDOW in_order AS (ORDER BY available_at, seq ROWS UNBOUNDED PRECEDING)
)
UPDATE "outbox_event" SET locked_by = $8, locked_at = statement_timestamp()
WHERE seq = ANY (ARRAY(
    SELECT seq FROM measured WHERE NOT starts_with_suspect AND NOT is_suspect AND before < 16777216))
RETURNING event_id, event_type, aggregate_type, aggregate_id, tenant_id, source_service, resource_type, operation_type, payload, payload_bytes, content_type, headers, occurred_at, created_at, available_at, attempts, seq, payload_is_text, coalesce(octet_length(payload), octet_length(payload_bytes)) AS bytes, status, lease_losses

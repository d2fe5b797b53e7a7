WITH chosen AS MATERIALIZED (
    SELECT letter.id FROM unnest($4::text[], $5::bigint[]) AS wanted (subscription_id, most)
    CROSS JOIN LATERAL (
        SELECT id FROM dlt_event
        WHERE dlt_event.subscription_id = wanted.subscription_id AND due IS NOT NULL AND due <= statement_timestamp() AND (locked_until IS NULL OR locked_until <= statement_timestamp()) AND id NOT IN (SELECT unnest($1::text[]))
        ORDER BY dlt_event.subscription_id, due, id LIMIT wanted.most
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS letter
)
UPDATE dlt_event SET locked_by = $2, locked_until = clock_timestamp() + $3 * interval '1 microsecond'
WHERE id = ANY (ARRAY(SELECT id FROM chosen))
RETURNING delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint, attempts, first_failed_at, id, (SELECT envelope FROM dlt_payload WHERE letter_id = dlt_event.id), retry_count,
    replay_at IS NOT NULL, replay_id, due

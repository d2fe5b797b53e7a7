WITH new AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
            $8::text[], $9::bigint[], $10::text[], $11::text[], $12::text[], $13::timestamptz[], $14::boolean[],
            $15::bigint[], $16::bytea[], $17::text[])
        AS new (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
            attempts, error, error_code, error_cause, first_failed_at, deferred, delay, envelope, readable)
), inserted AS (
    INSERT INTO dlt_event (id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain,
        endpoint, attempts, error, error_code, error_cause, first_failed_at, deferred, scheduled_at,
        created_at, updated_at)
    SELECT id, delivery_id, event_id, subscription_id, subscriber_id, event_type, domain, endpoint,
        least(attempts, 2147483647), error, error_code, error_cause, first_failed_at, deferred,
        now() + delay * interval '1 microsecond', date_trunc('milliseconds', now()), date_trunc('milliseconds', now())
    FROM new ORDER BY delivery_id
    ON CONFLICT (delivery_id) DO NOTHING
    RETURNING id AS inserted_id
)
INSERT INTO dlt_payload (letter_id, envelope, readable)
SELECT id, envelope, readable FROM new JOIN inserted ON inserted_id = id

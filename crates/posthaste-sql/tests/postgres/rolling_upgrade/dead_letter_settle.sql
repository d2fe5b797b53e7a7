WITH change AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::smallint[], $4::integer[], $5::integer[], $6::boolean[],
            $7::text[], $8::bigint[], $9::text[], $10::bigint[], $11::text[], $12::text[], $13::text[],
            $14::bigint[])
        AS change (letter_id, trigger, new_status, retries, requests, answers_replay, schedule, schedule_after,
            replay, replay_after, new_error, new_code, new_cause, duration)
), history AS (
    INSERT INTO retry_history
        (letter_id, error_code, error_message, error_cause, process_date, trigger, replay_id, duration_ms)
    SELECT letter.id, new_code, new_error, new_cause, clock_timestamp(), change.trigger,
        CASE WHEN answers_replay THEN letter.replay_id END, duration
    FROM change JOIN dlt_event AS letter ON letter.id = change.letter_id
    WHERE requests = 1
)
UPDATE dlt_event SET
    status = coalesce(new_status, status),
    retry_count = retry_count + retries,
    attempts = attempts + requests,
    scheduled_at = CASE schedule
        WHEN 'keep' THEN scheduled_at WHEN 'move' THEN statement_timestamp() + schedule_after * interval '1 microsecond' END,
    replay_at = CASE replay
        WHEN 'keep' THEN replay_at WHEN 'move' THEN statement_timestamp() + replay_after * interval '1 microsecond' END,
    replay_id = CASE replay WHEN 'clear' THEN NULL ELSE replay_id END,
    error = coalesce(new_error, error),
    error_code = coalesce(new_code, error_code),
    error_cause = CASE WHEN new_error IS NULL THEN error_cause ELSE new_cause END,
    locked_by = NULL,
    locked_until = NULL,
    updated_at = CASE requests WHEN 0 THEN updated_at ELSE date_trunc('milliseconds', statement_timestamp()) END
FROM change WHERE id = change.letter_id

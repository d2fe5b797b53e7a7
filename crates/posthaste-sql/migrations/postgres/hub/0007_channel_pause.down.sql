ALTER TABLE channel DROP COLUMN paused_at;

ALTER TABLE {table}
    DROP INDEX {table}_key,
    DROP INDEX {table}_ready,
    DROP COLUMN unfinished,
    DROP COLUMN ready;

DROP INDEX {table}_parked;
DROP INDEX {table}_key;
DROP INDEX {table}_ready;

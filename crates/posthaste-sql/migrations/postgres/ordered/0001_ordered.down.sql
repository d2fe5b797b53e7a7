DROP INDEX {table}_blocked;
DROP INDEX {table}_key;
DROP INDEX {table}_ready;

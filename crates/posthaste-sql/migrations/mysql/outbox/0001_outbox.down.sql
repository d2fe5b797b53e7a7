DROP TABLE {table}_owner;
DROP TABLE {table};

DROP TABLE schema_revision;
DROP TABLE schema_level;
DROP TABLE schema_version;
DROP TABLE schema_reference;
DROP TABLE schema_text;

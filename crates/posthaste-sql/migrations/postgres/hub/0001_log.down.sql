DROP TABLE quarantine_depth;
DROP TABLE quarantined_record;
DROP FUNCTION quarantined_record_counted();
DROP TABLE log_member;
DROP TABLE log_group;
DROP FUNCTION log_append(bigint[], bigint[], bigint[], bigint[], text[], text[], bytea[]);
DROP TABLE log_record;
DROP TABLE log_partition;

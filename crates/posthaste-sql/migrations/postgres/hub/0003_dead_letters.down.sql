DROP TABLE replay;
DROP TABLE retry_history;
DROP TABLE dlt_payload;
DROP TABLE dlt_event;
DROP FUNCTION dlt_event_counted();
DROP FUNCTION dlt_count(smallint, bigint);
DROP TABLE dlt_depth;

DROP TABLE replay;
DROP TABLE retry_history;
DROP TABLE dlt_payload;
DROP TABLE dlt_event;
DROP TABLE dlt_depth;

{down of 0001_outbox}
DROP TABLE outbox_event_migration;

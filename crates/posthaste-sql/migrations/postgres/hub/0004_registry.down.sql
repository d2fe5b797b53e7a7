DROP TABLE sealing;
DROP TABLE registry_version;
DROP TABLE subscription;
DROP TABLE event_definition;

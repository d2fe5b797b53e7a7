-- Event definitions and their subscriptions. Times are milliseconds of the database's clock.
CREATE TABLE event_definition (
    id             TEXT PRIMARY KEY,
    -- The key: '*' stands for anything.
    source_service TEXT NOT NULL,
    event_type     TEXT NOT NULL,
    resource_type  TEXT NOT NULL,
    operation_type TEXT NOT NULL,
    description    TEXT,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    -- Rises with every change: an update that is based on an older version is refused.
    version        INTEGER NOT NULL DEFAULT 1,
    -- Also serves the search for a definition by its key.
    UNIQUE (source_service, event_type, resource_type, operation_type)
);

CREATE TABLE subscription (
    id            TEXT PRIMARY KEY,
    subscriber_id TEXT NOT NULL,
    definition_id TEXT NOT NULL REFERENCES event_definition (id),
    -- For lists; the values of its query string are masked.
    endpoint      TEXT NOT NULL,
    -- A digest of the whole address. It finds the existing subscription when a request would create it a second time.
    endpoint_digest BLOB NOT NULL,
    payload_type  TEXT NOT NULL,
    auth_type     TEXT NOT NULL,
    -- Credentials, the whole address and the values of headers, encrypted: this database never sees a secret.
    credentials_sealed BLOB NOT NULL,
    -- For lists: a JSON array.
    header_names  TEXT NOT NULL DEFAULT '[]',
    timeout_ms    INTEGER,
    max_retry     INTEGER,
    tenant_id     TEXT,
    active        INTEGER NOT NULL CHECK (active IN (0, 1)),
    created_at    INTEGER NOT NULL,
    updated_at    INTEGER NOT NULL,
    version       INTEGER NOT NULL DEFAULT 1
);

-- The list of one subscriber.
CREATE INDEX subscription_subscriber ON subscription (subscriber_id, id);
-- The subscription that a subscriber has already, when the same one is created again.
CREATE INDEX subscription_same ON subscription (subscriber_id, definition_id, endpoint_digest);
-- The list of one definition, and the check that it is in use.
CREATE INDEX subscription_definition ON subscription (definition_id, id);

-- One row, whose version rises with every change above: a process that has read it knows if its copy of the registry is
-- still current.
CREATE TABLE registry_version (
    only    INTEGER PRIMARY KEY CHECK (only = 1),
    version INTEGER NOT NULL
);
INSERT INTO registry_version (only, version) VALUES (1, 0);

-- One row once credentials were sealed. A start without the key file then asks for the file: a new key could not open
-- them.
CREATE TABLE sealing (
    only INTEGER PRIMARY KEY CHECK (only = 1)
);

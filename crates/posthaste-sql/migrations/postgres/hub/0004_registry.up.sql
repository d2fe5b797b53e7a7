-- Event definitions and their subscriptions. Times are those of the database's clock.
CREATE TABLE event_definition (
    -- A UUID of version 7, as text. Lists are sorted by it.
    id             text COLLATE "C" PRIMARY KEY,
    -- The key: '*' stands for anything.
    source_service text COLLATE "C" NOT NULL,
    event_type     text COLLATE "C" NOT NULL,
    resource_type  text COLLATE "C" NOT NULL,
    operation_type text COLLATE "C" NOT NULL,
    description    text,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Rises with every change: an update that is based on an older version is refused.
    version        bigint NOT NULL DEFAULT 1,
    -- Also serves the search for a definition by its key.
    UNIQUE (source_service, event_type, resource_type, operation_type)
);

CREATE TABLE subscription (
    id            text COLLATE "C" PRIMARY KEY,
    subscriber_id text COLLATE "C" NOT NULL,
    definition_id text COLLATE "C" NOT NULL REFERENCES event_definition (id),
    -- For lists; the values of its query string are masked.
    endpoint      text NOT NULL,
    -- A digest of the whole address. It finds the existing subscription when a request would create it a second time.
    endpoint_digest bytea NOT NULL,
    payload_type  text NOT NULL,
    auth_type     text NOT NULL,
    -- Credentials, the whole address and the values of headers, encrypted: this database never sees a secret.
    credentials_sealed bytea NOT NULL,
    -- For lists.
    header_names  text[] NOT NULL DEFAULT '{}',
    timeout_ms    bigint CHECK (timeout_ms >= 0),
    max_retry     bigint CHECK (max_retry >= 0),
    tenant_id     text COLLATE "C",
    active        boolean NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    version       bigint NOT NULL DEFAULT 1
);

-- The list of one subscriber.
CREATE INDEX subscription_subscriber ON subscription (subscriber_id, id);
-- The subscription that a subscriber has already, when the same one is created again.
CREATE INDEX subscription_same ON subscription (subscriber_id, definition_id, endpoint_digest);
-- The list of one definition, and the check that it is in use.
CREATE INDEX subscription_definition ON subscription (definition_id, id);

-- One row, whose version rises with every change above: a process that has read it knows if its copy of the registry is
-- still current. Every change locks it first, so changes run one after the other: two processes that create the same
-- definition or subscription at once make one.
CREATE TABLE registry_version (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    version bigint NOT NULL
);
INSERT INTO registry_version (version) VALUES (0);

-- One row once credentials were sealed. A start without the key file then asks for the file: a new key could not open
-- them.
CREATE TABLE sealing (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row)
);

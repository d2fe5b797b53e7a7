-- The built-in Schema Registry: schemas, which have an id for ever, and the versions of subjects.
CREATE TABLE schema_text (
    -- Records carry the id, so it is never given to another schema.
    id     integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Finds a schema that is registered again. It does not depend on comments and layout.
    digest bytea NOT NULL UNIQUE,
    text   text NOT NULL
);

-- The imports of a schema.
CREATE TABLE schema_reference (
    schema_id integer NOT NULL REFERENCES schema_text (id),
    -- The position in the list, from 0.
    place     integer NOT NULL,
    -- The name in the import statement.
    name      text NOT NULL,
    -- The version that is imported.
    subject   text COLLATE "C" NOT NULL,
    version   integer NOT NULL,
    PRIMARY KEY (schema_id, place)
);
-- The schemas that refer to a version, before it is deleted.
CREATE INDEX schema_reference_target ON schema_reference (subject, version);

CREATE TABLE schema_version (
    subject   text COLLATE "C" NOT NULL,
    -- From 1.
    version   integer NOT NULL,
    schema_id integer NOT NULL REFERENCES schema_text (id),
    -- A deleted version can still be read. It is removed when it is deleted permanently.
    deleted   boolean NOT NULL DEFAULT false,
    PRIMARY KEY (subject, version)
);
-- The versions that have a schema.
CREATE INDEX schema_version_schema ON schema_version (schema_id);

-- The compatibility level of a subject; that of the empty subject is the global one.
CREATE TABLE schema_level (
    subject text COLLATE "C" PRIMARY KEY,
    level   text NOT NULL
);

-- One row, whose revision rises with every change above. A change names the revision that it is based on. Its update is
-- the first statement of every change, so changes run one after the other.
CREATE TABLE schema_revision (
    one_row  boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    revision bigint NOT NULL
);
INSERT INTO schema_revision (revision) VALUES (0);

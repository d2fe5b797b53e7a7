-- The built-in Schema Registry: schemas, which have an id for ever, and the versions of subjects.
CREATE TABLE schema_text (
    -- AUTOINCREMENT: records carry the id, so it is never given to another schema.
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    -- Finds a schema that is registered again. It does not depend on comments and layout.
    digest BLOB NOT NULL UNIQUE,
    text   TEXT NOT NULL
);

-- The imports of a schema.
CREATE TABLE schema_reference (
    schema_id INTEGER NOT NULL REFERENCES schema_text (id),
    -- The position in the list, from 0.
    place     INTEGER NOT NULL,
    -- The name in the import statement.
    name      TEXT NOT NULL,
    -- The version that is imported.
    subject   TEXT NOT NULL,
    version   INTEGER NOT NULL,
    PRIMARY KEY (schema_id, place)
) WITHOUT ROWID;
-- The schemas that refer to a version, before it is deleted.
CREATE INDEX schema_reference_target ON schema_reference (subject, version);

CREATE TABLE schema_version (
    subject   TEXT NOT NULL,
    -- From 1.
    version   INTEGER NOT NULL,
    schema_id INTEGER NOT NULL REFERENCES schema_text (id),
    -- A deleted version can still be read. It is removed when it is deleted permanently.
    deleted   INTEGER NOT NULL DEFAULT 0 CHECK (deleted IN (0, 1)),
    PRIMARY KEY (subject, version)
) WITHOUT ROWID;
-- The versions that have a schema.
CREATE INDEX schema_version_schema ON schema_version (schema_id);

-- The compatibility level of a subject; that of the empty subject is the global one.
CREATE TABLE schema_level (
    subject TEXT PRIMARY KEY,
    level   TEXT NOT NULL
) WITHOUT ROWID;

-- One row, whose revision rises with every change above. A change names the revision that it is based on.
CREATE TABLE schema_revision (
    only     INTEGER PRIMARY KEY CHECK (only = 1),
    revision INTEGER NOT NULL
);
INSERT INTO schema_revision (only, revision) VALUES (1, 0);

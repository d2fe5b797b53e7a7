-- The conditions on the payload of events, as a JSON array of path, op and value; NULL if there are none. A text, so that
-- numbers keep the digits that the caller wrote.
ALTER TABLE subscription ADD COLUMN filter TEXT;

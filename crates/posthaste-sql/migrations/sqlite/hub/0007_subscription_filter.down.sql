ALTER TABLE subscription DROP COLUMN filter;

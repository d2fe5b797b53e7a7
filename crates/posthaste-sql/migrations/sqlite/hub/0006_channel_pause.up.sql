-- When an operator paused the channel; NULL if it is not paused.
ALTER TABLE channel ADD COLUMN paused_at INTEGER;

DROP TABLE write_probe;
DROP TABLE channel;

-- The outbox table of the hub, with its own history, as every outbox table has one. Programs of earlier schemas created it
-- by themselves.
{up of 0001_outbox}

-- Whether deliveries of a channel go out: its circuit, and a pause by hand. Both are read when lanes are handed over and when
-- they are worked, so that this one row is all that has to change, whatever waits behind it. An open circuit lets one lane
-- through at a time once hold_until has passed; until then, and while it is paused, none.
ALTER TABLE channels
    ADD COLUMN circuit_state        text NOT NULL DEFAULT 'closed' CHECK (circuit_state IN ('closed', 'open', 'paused')),
    ADD COLUMN circuit_changed_at   timestamptz,
    ADD COLUMN consecutive_failures integer NOT NULL DEFAULT 0; -- those that opened the circuit, and of its probes since

-- What can be retried. Rows come into it by failing only.
CREATE INDEX deliveries_failed ON deliveries (tenant_id, channel_id, id) WHERE status = 'failed';

-- The audit log is read newest first, by id (UUIDv7): of everything, of a tenant, of who did it, of what was changed.
CREATE INDEX audit_log_actor ON audit_log (actor_id, id);
CREATE INDEX audit_log_resource ON audit_log (resource_id, id);
CREATE INDEX audit_log_action ON audit_log (action, resource_type, id);

-- Ranges of client addresses that are refused everywhere, or excepted from the limits that count addresses. The range with
-- the longest prefix decides. Nodes hold them in memory, so rows carry their version and are marked instead of deleted.
CREATE TABLE address_ranges (
    id          uuid PRIMARY KEY,
    cidr        cidr NOT NULL, -- IPv4-mapped IPv6 is stored as IPv4
    kind        text NOT NULL CHECK (kind IN ('deny', 'exempt')),
    note        text NOT NULL DEFAULT '' CHECK (length(note) <= 500),
    expires_at  timestamptz,
    deleted_at  timestamptz,
    version     bigint NOT NULL,
    inserted_at timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX address_ranges_cidr_key ON address_ranges (cidr) WHERE deleted_at IS NULL;
CREATE INDEX address_ranges_version ON address_ranges (version);

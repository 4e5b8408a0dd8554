-- A rule copies every activity of its source channel's conversations to its targets. Nodes hold the enabled ones in memory,
-- so rows carry their version and are marked instead of deleted.
--
-- target_channel_ids has no foreign key: an array can't. Whoever writes a row has checked under the configuration row's lock
-- that all are channels of the tenant, channels are never removed, and readers skip those of another tenant all the same.
CREATE TABLE routing_rules (
    tenant_id          uuid NOT NULL,
    id                 uuid NOT NULL,
    name               text NOT NULL CHECK (name <> '' AND length(name) <= 200),
    source_channel_id  uuid NOT NULL,
    target_channel_ids uuid[] NOT NULL CHECK (cardinality(target_channel_ids) BETWEEN 1 AND 20),
    enabled            boolean NOT NULL DEFAULT true,
    deleted_at         timestamptz,
    version            bigint NOT NULL,
    inserted_at        timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, source_channel_id) REFERENCES channels (tenant_id, id),
    CONSTRAINT routing_rules_targets CHECK (NOT source_channel_id = ANY (target_channel_ids))
);
CREATE UNIQUE INDEX routing_rules_name_key ON routing_rules (tenant_id, name) WHERE deleted_at IS NULL;
CREATE INDEX routing_rules_version ON routing_rules (version);

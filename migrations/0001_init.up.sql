-- The first schema. Conventions that every later migration keeps:
--   * ids are UUIDv7, made by the program; timestamps are UTC;
--   * every foreign key is (tenant_id, id), so that a reference across tenants can't be stored;
--   * rows that nodes hold in memory (the directory) carry `version`, the value of the configuration row at their last
--     change; such rows are never deleted while a node may still hold them, they are marked (revoked_at, deleted_at);
--   * activities and inbound events are partitioned by month on their id, deliveries and attempts on activity_id.

-- One row. Whoever changes configuration bumps it first in the same transaction; the row lock, held to the commit, makes
-- versions become visible in their own order.
CREATE TABLE configuration (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    version   bigint NOT NULL
);
INSERT INTO configuration (version) VALUES (1);

CREATE TABLE tenants (
    id            uuid PRIMARY KEY,
    name          text NOT NULL CHECK (name <> '' AND length(name) <= 200),
    status        text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
    limits        jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(limits) = 'object'),
    max_in_flight integer NOT NULL DEFAULT 400 CHECK (max_in_flight BETWEEN 1 AND 100000),
    version       bigint NOT NULL,
    inserted_at   timestamptz NOT NULL DEFAULT now(),
    updated_at    timestamptz NOT NULL DEFAULT now()
);
-- Portal users name their tenant when they sign in: two tenants that differ in case only would be a trap.
CREATE UNIQUE INDEX tenants_name_key ON tenants (lower(name));
CREATE INDEX tenants_version ON tenants (version);

CREATE TABLE api_keys (
    tenant_id    uuid NOT NULL REFERENCES tenants (id),
    id           uuid NOT NULL,
    name         text NOT NULL CHECK (name <> '' AND length(name) <= 200),
    prefix       text NOT NULL,
    hash         bytea NOT NULL CHECK (length(hash) = 32),
    scopes       text[] NOT NULL,
    expires_at   timestamptz,
    revoked_at   timestamptz, -- may lie in the future: an old key that overlaps its successor
    last_used_at timestamptz,
    version      bigint NOT NULL,
    inserted_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id)
);
CREATE UNIQUE INDEX api_keys_hash_key ON api_keys (hash);
CREATE UNIQUE INDEX api_keys_id_key ON api_keys (id); -- last_used_at is written by id, for keys of many tenants at once
CREATE INDEX api_keys_version ON api_keys (version);

CREATE TABLE operator_tokens (
    id           uuid PRIMARY KEY,
    name         text NOT NULL CHECK (name <> '' AND length(name) <= 200),
    prefix       text NOT NULL,
    hash         bytea NOT NULL CHECK (length(hash) = 32),
    scopes       text[] NOT NULL,
    expires_at   timestamptz,
    revoked_at   timestamptz,
    last_used_at timestamptz,
    version      bigint NOT NULL,
    inserted_at  timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX operator_tokens_hash_key ON operator_tokens (hash);
CREATE INDEX operator_tokens_version ON operator_tokens (version);

CREATE TABLE channels (
    tenant_id                  uuid NOT NULL REFERENCES tenants (id),
    id                         uuid NOT NULL,
    name                       text NOT NULL CHECK (name <> '' AND length(name) <= 200),
    type                       text NOT NULL,
    mode                       text NOT NULL CHECK (mode IN ('inbound', 'outbound', 'duplex')),
    status                     text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'inactive')),
    config                     bytea NOT NULL, -- sealed JSON object
    secret                     bytea NOT NULL, -- sealed
    secret_hash                bytea NOT NULL CHECK (length(secret_hash) = 32),
    previous_secret            bytea,
    previous_secret_hash       bytea CHECK (length(previous_secret_hash) = 32),
    previous_secret_expires_at timestamptz,
    require_signature          boolean NOT NULL DEFAULT true,
    ordered                    boolean NOT NULL DEFAULT true,
    rate_limit                 text,
    retry_policy               jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(retry_policy) = 'object'),
    max_in_flight              integer NOT NULL DEFAULT 100 CHECK (max_in_flight BETWEEN 1 AND 100000),
    hold_until                 timestamptz, -- pause, breaker and pace: one row, not all its lanes
    deleted_at                 timestamptz,
    version                    bigint NOT NULL,
    inserted_at                timestamptz NOT NULL DEFAULT now(),
    updated_at                 timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    CONSTRAINT channels_previous_secret CHECK ((previous_secret IS NULL) = (previous_secret_hash IS NULL)
        AND (previous_secret IS NULL) = (previous_secret_expires_at IS NULL))
);
CREATE UNIQUE INDEX channels_id_key ON channels (id);
CREATE UNIQUE INDEX channels_name_key ON channels (tenant_id, name) WHERE deleted_at IS NULL;
CREATE UNIQUE INDEX channels_secret_hash_key ON channels (secret_hash) WHERE deleted_at IS NULL;
CREATE INDEX channels_version ON channels (version);

CREATE TABLE audit_log (
    id            uuid PRIMARY KEY,
    tenant_id     uuid REFERENCES tenants (id),
    actor_type    text NOT NULL,
    actor_id      text NOT NULL,
    action        text NOT NULL,
    resource_type text NOT NULL,
    resource_id   text NOT NULL,
    changes       jsonb NOT NULL DEFAULT '{}',
    request_id    text,
    inserted_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX audit_log_tenant ON audit_log (tenant_id, id);

CREATE TABLE participants (
    tenant_id    uuid NOT NULL,
    id           uuid NOT NULL,
    channel_id   uuid NOT NULL,
    external_id  text NOT NULL CHECK (external_id <> '' AND length(external_id) <= 255),
    display_name text CHECK (length(display_name) <= 255),
    metadata     jsonb NOT NULL DEFAULT '{}',
    inserted_at  timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id)
);
CREATE INDEX participants_external_id ON participants (channel_id, external_id);

CREATE TABLE participant_identities (
    tenant_id      uuid NOT NULL,
    channel_id     uuid NOT NULL,
    kind           text NOT NULL, -- external_id, user_id, phone
    value          text NOT NULL CHECK (value <> '' AND length(value) <= 255),
    participant_id uuid NOT NULL,
    inserted_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (channel_id, kind, value),
    FOREIGN KEY (tenant_id, participant_id) REFERENCES participants (tenant_id, id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id)
);
CREATE INDEX participant_identities_participant ON participant_identities (tenant_id, participant_id);

CREATE TABLE conversations (
    tenant_id      uuid NOT NULL,
    id             uuid NOT NULL,
    channel_id     uuid NOT NULL,
    participant_id uuid,
    status         text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'closed')),
    last_seq       bigint NOT NULL DEFAULT 0,
    metadata       jsonb NOT NULL DEFAULT '{}',
    inserted_at    timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now(), -- of the last activity or change of status
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id),
    FOREIGN KEY (tenant_id, participant_id) REFERENCES participants (tenant_id, id)
) WITH (fillfactor = 70); -- last_seq and updated_at change with each activity: room for HOT updates
CREATE INDEX conversations_participant ON conversations (tenant_id, participant_id, status) WHERE participant_id IS NOT NULL;
CREATE INDEX conversations_channel ON conversations (tenant_id, channel_id, id);

CREATE TABLE activities (
    tenant_id       uuid NOT NULL,
    id              uuid NOT NULL,
    conversation_id uuid NOT NULL,
    seq             bigint NOT NULL,
    type            text NOT NULL,
    sender          text NOT NULL, -- the name shown
    author          text NOT NULL DEFAULT '', -- who wrote it, as the program knows them: decides who may edit
    text            text,
    attachments     jsonb NOT NULL DEFAULT '[]',
    metadata        jsonb NOT NULL DEFAULT '{}',
    idempotency_key text,
    reply_to_id     uuid,
    edited_at       timestamptz,
    deleted_at      timestamptz,
    inserted_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, conversation_id) REFERENCES conversations (tenant_id, id)
) PARTITION BY RANGE (id);

-- Claimed in the activity's own transaction. Lives longer than any provider's retries, and longer than a month's partition.
CREATE TABLE idempotency_keys (
    tenant_id       uuid NOT NULL,
    conversation_id uuid NOT NULL,
    caller          text NOT NULL,
    key             text NOT NULL,
    body_hash       bytea NOT NULL,
    activity_id     uuid NOT NULL,
    inserted_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, conversation_id, caller, key),
    FOREIGN KEY (tenant_id, conversation_id) REFERENCES conversations (tenant_id, id)
);
CREATE INDEX idempotency_keys_inserted_at ON idempotency_keys USING brin (inserted_at);

-- The ids by which a provider, or a sender of generic webhooks, names a message of a channel; kept as long as the keys above.
CREATE TABLE provider_messages (
    tenant_id   uuid NOT NULL,
    channel_id  uuid NOT NULL,
    direction   text NOT NULL CHECK (direction IN ('in', 'out')),
    provider_id text NOT NULL CHECK (provider_id <> '' AND length(provider_id) <= 512),
    activity_id uuid NOT NULL,
    delivery_id uuid, -- set for direction 'out'
    inserted_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (channel_id, direction, provider_id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id)
);
CREATE INDEX provider_messages_inserted_at ON provider_messages USING brin (inserted_at);

CREATE TABLE inbound_events (
    tenant_id    uuid NOT NULL,
    id           uuid NOT NULL,
    channel_id   uuid NOT NULL,
    endpoint     text NOT NULL CHECK (endpoint IN ('inbound', 'status')),
    content_type text NOT NULL DEFAULT '',
    headers      jsonb NOT NULL DEFAULT '{}', -- a short list of harmless ones; never a signature or credential
    body         bytea NOT NULL,              -- the exact bytes received
    state        text NOT NULL DEFAULT 'received' CHECK (state IN ('received', 'processed', 'rejected', 'failed')),
    tries        integer NOT NULL DEFAULT 0,
    error        text,
    result       jsonb,                       -- what it became: activity ids, duplicates, rejected items, receipts, unknown parts
    inserted_at  timestamptz NOT NULL DEFAULT now(),
    processed_at timestamptz,
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id)
) PARTITION BY RANGE (id);
CREATE INDEX inbound_events_open ON inbound_events (state, id) WHERE state IN ('received', 'failed', 'rejected');
CREATE INDEX inbound_events_channel ON inbound_events (channel_id, id);

-- A lane is the order in which a channel receives: one for each conversation, or one for each hash slot of an unordered
-- channel (then conversation_id is the slot's number as a UUID).
CREATE TABLE lanes (
    tenant_id       uuid NOT NULL,
    id              uuid PRIMARY KEY,
    channel_id      uuid NOT NULL,
    conversation_id uuid NOT NULL,
    next_at         timestamptz,               -- when there is work; NULL: nothing to do
    wakes           bigint NOT NULL DEFAULT 0, -- raised by each append: a worker that finishes sees that it missed one
    lease_token     uuid,
    lease_until     timestamptz,
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id),
    CONSTRAINT lanes_lease CHECK ((lease_token IS NULL) = (lease_until IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
        autovacuum_analyze_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);
CREATE UNIQUE INDEX lanes_key ON lanes (channel_id, conversation_id);
CREATE INDEX lanes_ready ON lanes (tenant_id, channel_id, next_at) WHERE lease_token IS NULL AND next_at IS NOT NULL;
CREATE INDEX lanes_leased ON lanes (tenant_id, channel_id, lease_until) WHERE lease_token IS NOT NULL;

CREATE TABLE deliveries (
    tenant_id           uuid NOT NULL,
    id                  uuid NOT NULL,
    activity_id         uuid NOT NULL,
    channel_id          uuid NOT NULL,
    lane_id             uuid NOT NULL,
    seq                 bigint NOT NULL, -- the activity's
    status              text NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'uncertain', 'sent', 'delivered', 'read', 'failed')),
    attempts            integer NOT NULL DEFAULT 0,
    next_at             timestamptz NOT NULL DEFAULT now(),
    reason              text, -- a stable word: why it failed or waits
    last_error          text, -- for people
    provider_message_id text,
    sent_at             timestamptz,
    delivered_at        timestamptz,
    read_at             timestamptz,
    retry_count         integer NOT NULL DEFAULT 0,
    retried_by          text,
    retried_at          timestamptz,
    inserted_at         timestamptz NOT NULL DEFAULT now(),
    updated_at          timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id, activity_id),
    FOREIGN KEY (tenant_id, activity_id) REFERENCES activities (tenant_id, id),
    FOREIGN KEY (tenant_id, channel_id) REFERENCES channels (tenant_id, id)
) PARTITION BY RANGE (activity_id);
CREATE UNIQUE INDEX deliveries_activity_channel_key ON deliveries (activity_id, channel_id);
CREATE INDEX deliveries_lane ON deliveries (lane_id, seq) WHERE status = 'pending';
CREATE INDEX deliveries_uncertain ON deliveries (next_at) WHERE status = 'uncertain';

CREATE TABLE attempts (
    tenant_id   uuid NOT NULL,
    id          uuid NOT NULL,
    activity_id uuid NOT NULL,
    delivery_id uuid NOT NULL,
    number      integer NOT NULL, -- 1 for the first; starts again after a replay by hand
    outcome     text NOT NULL CHECK (outcome IN ('sent', 'retry', 'failed', 'uncertain')),
    reason      text,
    status_code integer,          -- HTTP; NULL when there was no answer
    error       text,
    response    text,             -- the beginning of the answer, for people
    started_at  timestamptz NOT NULL,
    duration_ms integer NOT NULL,
    PRIMARY KEY (tenant_id, delivery_id, id, activity_id),
    FOREIGN KEY (tenant_id, delivery_id, activity_id) REFERENCES deliveries (tenant_id, id, activity_id)
) PARTITION BY RANGE (activity_id);

-- The smallest UUIDv7 of an instant (RFC 9562, 5.7: 48 bits of Unix milliseconds lead).
CREATE FUNCTION uuid_v7_floor(at timestamptz) RETURNS uuid LANGUAGE sql STABLE STRICT AS $$
    SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- Makes the monthly partitions from `first` (any day of its month) on for `months` months, and returns how many were new.
-- Built aside and attached, so that readers and writers of the parent go on; callers set lock_timeout.
CREATE FUNCTION ensure_partitions(first date, months integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    month_start timestamptz;
    parent text;
    child text;
    made integer := 0;
BEGIN
    FOR i IN 0 .. months - 1 LOOP
        month_start := (date_trunc('month', first::timestamp) + make_interval(months => i)) AT TIME ZONE 'UTC';
        FOREACH parent IN ARRAY ARRAY['activities', 'inbound_events', 'deliveries', 'attempts'] LOOP
            child := parent || to_char(month_start AT TIME ZONE 'UTC', '"_p"YYYY_MM');
            CONTINUE WHEN to_regclass(child) IS NOT NULL;
            EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', child, parent);
            IF parent = 'activities' THEN
                -- Unique within a month; across months the conversation's row lock keeps it.
                EXECUTE format('CREATE UNIQUE INDEX %I ON %I (conversation_id, seq)', child || '_seq_key', child);
            END IF;
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, child,
                uuid_v7_floor(month_start),
                uuid_v7_floor((month_start AT TIME ZONE 'UTC' + interval '1 month') AT TIME ZONE 'UTC'));
            made := made + 1;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;

-- The month before, for clocks that are behind; three ahead, for a job that has been failing for weeks.
SELECT ensure_partitions(((now() AT TIME ZONE 'UTC') - interval '1 month')::date, 5);

-- Uploaded files. The bytes lie in the storage, under "<tenant_id>/<id>"; the row is written in the transaction of its activity.
-- activity_id has no foreign key: activities go by whole partitions.
CREATE TABLE attachments (
    tenant_id       uuid NOT NULL,
    id              uuid NOT NULL,
    conversation_id uuid NOT NULL,
    activity_id     uuid NOT NULL,
    content_type    text NOT NULL CHECK (content_type <> '' AND length(content_type) <= 255), -- sniffed from the bytes
    size            bigint NOT NULL CHECK (size > 0),
    sha256          bytea NOT NULL CHECK (length(sha256) = 32),
    filename        text NOT NULL CHECK (filename <> '' AND length(filename) <= 255),         -- a label
    inserted_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, conversation_id) REFERENCES conversations (tenant_id, id)
);
CREATE INDEX attachments_conversation ON attachments (tenant_id, conversation_id);
CREATE INDEX attachments_activity ON attachments (tenant_id, activity_id);

-- The types of files that the tenant's uploads may have; NULL: those of the installation.
ALTER TABLE tenants ADD COLUMN allowed_upload_types text[] CHECK (cardinality(allowed_upload_types) > 0);

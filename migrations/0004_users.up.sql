-- People who sign in, of both realms: the administrators of the installation, and the users of each tenant. One table, so that
-- sessions, links and their queries exist once; realm stands where other tables have tenant_id. It is the tenant's id, or
-- the greatest UUID (RFC 9562, 5.10) for administrators, never the nil UUID, so that a forgotten tenant finds nobody.
--
-- Nodes hold no user in memory: each request reads its session with its user, and what was taken away is gone at once.
CREATE TABLE users (
    realm                uuid NOT NULL CHECK (realm <> '00000000-0000-0000-0000-000000000000'),
    id                   uuid NOT NULL,
    tenant_id            uuid GENERATED ALWAYS AS (NULLIF(realm, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)) STORED
        REFERENCES tenants (id), -- NULL for administrators
    email                text NOT NULL CHECK (email <> '' AND length(email) <= 254), -- in canonical form, which the program makes
    name                 text NOT NULL DEFAULT '' CHECK (length(name) <= 200),
    role                 text NOT NULL,
    status               text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'inactive')),
    password_hash        text,                      -- bcrypt; NULL: only a sign-in link lets in
    password_version     bigint NOT NULL DEFAULT 1, -- raised with each change: sessions and devices of an earlier one are void
    must_change_password boolean NOT NULL DEFAULT false,
    last_sign_in_at      timestamptz,
    inserted_at          timestamptz NOT NULL DEFAULT now(),
    updated_at           timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (realm, id),
    CONSTRAINT users_email_key UNIQUE (realm, email),
    CONSTRAINT users_role CHECK (CASE WHEN realm = 'ffffffff-ffff-ffff-ffff-ffffffffffff'
        THEN role IN ('super_admin', 'admin', 'viewer')
        ELSE role IN ('owner', 'admin', 'member', 'viewer') END)
);

-- A session that was ended is deleted; one whose time is over is no session any more, and is removed in the background.
CREATE TABLE web_sessions (
    realm            uuid NOT NULL,
    user_id          uuid NOT NULL,
    id               uuid NOT NULL,
    hash             bytea NOT NULL CHECK (length(hash) = 32), -- SHA-256 of the token
    password_version bigint NOT NULL,                          -- of the user at the sign-in
    by_link          boolean NOT NULL,
    address          text NOT NULL,
    user_agent       text NOT NULL CHECK (length(user_agent) <= 200),
    seen_at          timestamptz NOT NULL DEFAULT now(),       -- to about a minute
    expires_at       timestamptz NOT NULL,                     -- the absolute end; the idle one follows from seen_at
    inserted_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (realm, user_id, id),
    CONSTRAINT web_sessions_hash_key UNIQUE (hash),
    FOREIGN KEY (realm, user_id) REFERENCES users (realm, id) ON DELETE CASCADE
) WITH (fillfactor = 80); -- seen_at is in no index: its updates stay in their page

-- One open link a user: a new one takes the place of the last. Spending it deletes the row.
CREATE TABLE sign_in_links (
    realm       uuid NOT NULL,
    user_id     uuid NOT NULL,
    hash        bytea NOT NULL CHECK (length(hash) = 32), -- SHA-256 of the token
    expires_at  timestamptz NOT NULL,
    inserted_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (realm, user_id),
    CONSTRAINT sign_in_links_hash_key UNIQUE (hash),
    FOREIGN KEY (realm, user_id) REFERENCES users (realm, id) ON DELETE CASCADE
);

-- The nodes' heartbeats: who lives, when the network can't tell. One row for each start of a node, written every second.
-- Unlogged: after a crash of the server every node writes anew within a second, and no commit waits for the disk, so that
-- a heartbeat is as quick as the network.
CREATE UNLOGGED TABLE cluster_nodes (
    id         text PRIMARY KEY CHECK (id ~ '^[0-9a-f]{16}$'),
    label      text NOT NULL,        -- of its cluster
    name       text NOT NULL,        -- the operator's word for it
    address    text NOT NULL,        -- where the others reach it
    version    text NOT NULL,
    started_at timestamptz NOT NULL, -- by the node's own clock
    seen_at    timestamptz NOT NULL  -- by the database's clock
) WITH (fillfactor = 50);            -- room for new versions of a row beside it

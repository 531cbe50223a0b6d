-- The fixed tables of schema embed_assets. Chunk and similar tables are made from each corpus'
-- declaration (queries/chunks.sql), since their key columns are the user's.
-- Feeds are append-only; state tables are touched only by our own processes.

CREATE EXTENSION IF NOT EXISTS vector;

-- One row per kind. Switch and rollback of the model are updates of this one row.
-- lock_id names the kind in advisory locks: an assigned number, since a hash could collide.
CREATE TABLE embed_assets.corpora (
    kind text COLLATE "C" PRIMARY KEY,
    lock_id integer GENERATED ALWAYS AS IDENTITY UNIQUE,
    active_model_id integer,
    previous_model_id integer,
    target_model_id integer,
    -- Since when the target is another than the active one: without an embedder, the active one is frozen since then.
    target_since timestamptz,
    paused_at timestamptz,
    -- Whose turn it is to refresh similar items: a refresh that has lost it without noticing writes no list any more.
    similar_turn uuid
);

-- The lease that makes one enqueuer per kind; it outlives the commits within a scan.
CREATE TABLE embed_assets.corpus_scans (
    kind text COLLATE "C" PRIMARY KEY,
    token uuid,
    until timestamptz,
    last_scan_at timestamptz,
    last_reconcile_at timestamptz,
    seconds double precision
);

CREATE TABLE embed_assets.embedding_models (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    identity text COLLATE "C" NOT NULL UNIQUE,
    dimensions integer NOT NULL CHECK (dimensions BETWEEN 1 AND 16000)
);

-- Facts of a model of a kind. Retired: no process brings it back, only an operator. Dropped: its partition is gone.
-- judged_at, unmet: when it was last looked at whether search may read it, and what stood against that.
CREATE TABLE embed_assets.corpus_models (
    kind text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    index_ready boolean NOT NULL DEFAULT FALSE,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    judged_at timestamptz,
    unmet text,
    retired_at timestamptz,
    dropped_at timestamptz,
    PRIMARY KEY (kind, model_id)
);

-- Append-only feed: no unique key, so nothing can conflict or wait. Consumed by deleting rows,
-- never by "id > last" (a transaction that commits late would be skipped).
CREATE TABLE embed_assets.source_changes (
    id bigint GENERATED ALWAYS AS IDENTITY,
    kind text COLLATE "C" NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    reason text NOT NULL,
    forced boolean NOT NULL DEFAULT FALSE,
    lane smallint NOT NULL DEFAULT 0,
    scope text COLLATE "C",
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX source_changes_by_kind ON embed_assets.source_changes (kind, id);

-- One row per (kind, source id, model): "this source row is not what the vectors say".
-- Finished entries leave, so the table is as large as the backlog.
CREATE TABLE embed_assets.semantic_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY,
    kind text COLLATE "C" NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    scope text COLLATE "C",
    reason text NOT NULL CHECK (reason IN ('write', 'scan', 'reconcile', 'backfill', 'manual')),
    lane smallint NOT NULL DEFAULT 0 CHECK (lane IN (0, 1)),
    rank double precision NOT NULL DEFAULT 'Infinity',
    status text NOT NULL DEFAULT 'pending'
    CHECK (status IN ('pending', 'leased', 'retry_wait', 'dead')),
    wave_id bigint,
    attempts smallint NOT NULL DEFAULT 0,
    crashes smallint NOT NULL DEFAULT 0,
    timeouts smallint NOT NULL DEFAULT 0,
    -- How often it died since its source last changed: what the reconciler's park is reckoned from.
    deaths smallint NOT NULL DEFAULT 0,
    -- How often it was claimed since it was entered: a row that wave after wave gives back, charging nobody, would
    -- show in neither attempts (charged failures) nor crashes (lost leases).
    claims integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    forced boolean NOT NULL DEFAULT FALSE,
    -- What the row was when its last failure was recorded; a dead entry revives when the row is no longer that.
    revision text,
    revision_known boolean NOT NULL DEFAULT FALSE,
    error_code text,
    error_class text,
    error_message text,
    failures integer NOT NULL DEFAULT 0,
    first_failed_at timestamptz,
    last_failed_at timestamptz,
    dismissed_at timestamptz,
    enqueued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (kind, source_id, model_id),
    CHECK (status <> 'leased' OR wave_id IS NOT NULL)
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX semantic_outbox_claim ON embed_assets.semantic_outbox (kind, model_id, lane, rank, id)
WHERE status = 'pending';
-- From scope to scope, and one scope's in order; a kind without scopes has no part in it.
CREATE INDEX semantic_outbox_scope ON embed_assets.semantic_outbox (kind, model_id, scope, lane, rank, id)
WHERE status = 'pending' AND scope IS NOT NULL;
CREATE INDEX semantic_outbox_retry ON embed_assets.semantic_outbox (kind, model_id, next_attempt_at)
WHERE status = 'retry_wait';
CREATE INDEX semantic_outbox_dead ON embed_assets.semantic_outbox (kind, model_id)
WHERE status = 'dead';
CREATE INDEX semantic_outbox_wave ON embed_assets.semantic_outbox (wave_id, status)
WHERE wave_id IS NOT NULL;
CREATE INDEX semantic_outbox_leased ON embed_assets.semantic_outbox (kind, wave_id)
WHERE status = 'leased';

-- The wave is the lease: token and expiry live here, a heartbeat touches only this row.
CREATE TABLE embed_assets.claimed_waves (
    wave_id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    run_id text NOT NULL,
    token uuid NOT NULL DEFAULT gen_random_uuid(),
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    lease_until timestamptz NOT NULL,
    closed_at timestamptz,
    outcome text CHECK (outcome IN ('written', 'released', 'expired')),
    -- Of an expired wave: since when no entry is leased to it any more.
    healed_at timestamptz,
    claimed integer NOT NULL DEFAULT 0,
    indexed integer NOT NULL DEFAULT 0,
    removed integer NOT NULL DEFAULT 0,
    reused integer NOT NULL DEFAULT 0,
    gone integer NOT NULL DEFAULT 0,
    superseded integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    dead integer NOT NULL DEFAULT 0,
    lost integer NOT NULL DEFAULT 0,
    texts integer NOT NULL DEFAULT 0,
    -- Texts as often as they were sent: what repeats and halvings cost beyond `texts`.
    sent integer NOT NULL DEFAULT 0,
    tokens bigint NOT NULL DEFAULT 0,
    stage_seconds double precision,
    write_seconds double precision,
    CHECK ((closed_at IS NULL) = (outcome IS NULL))
) WITH (fillfactor = 50);
CREATE INDEX claimed_waves_open ON embed_assets.claimed_waves (kind, lease_until) WHERE closed_at IS NULL;
CREATE INDEX claimed_waves_run ON embed_assets.claimed_waves (run_id);
CREATE INDEX claimed_waves_unhealed ON embed_assets.claimed_waves (kind, wave_id)
WHERE outcome = 'expired' AND healed_at IS NULL;
CREATE INDEX claimed_waves_closed ON embed_assets.claimed_waves (closed_at) WHERE closed_at IS NOT NULL;

-- A wave's plan from stage to write. Row -1 of each source is its header: what is to be done with it,
-- how many chunks follow and which revision was loaded. No header means the plan was lost (unlogged):
-- the entry goes back to pending instead of being read as "zero chunks".
CREATE UNLOGGED TABLE embed_assets.wave_chunks (
    wave_id bigint NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    chunk_index integer NOT NULL,
    text_hash bytea,
    body text,
    heading_path text,
    action text CHECK (action IN ('embed', 'clear', 'gone', 'superseded')),
    chunk_count integer,
    revision text,
    PRIMARY KEY (wave_id, source_id, chunk_index)
);

-- The ledger: what has been paid for. No primary key, since a COPY into a key would lose a paid batch
-- when two waves share a text; readers take the newest.
CREATE TABLE embed_assets.chunk_embeddings (
    model_id integer NOT NULL,
    text_hash bytea NOT NULL,
    embedding vector NOT NULL,
    tokens integer,
    staged_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (toast_tuple_target = 8160);
CREATE INDEX chunk_embeddings_by_hash ON embed_assets.chunk_embeddings (model_id, text_hash);
CREATE INDEX chunk_embeddings_by_age ON embed_assets.chunk_embeddings USING brin (staged_at);

-- Which revision's vectors are in the chunk table. Written only in the write transaction.
CREATE TABLE embed_assets.semantic_stamps (
    kind text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    revision text,
    chunk_count integer NOT NULL,
    embedded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    wave_id bigint,
    PRIMARY KEY (kind, model_id, source_id)
);

CREATE TABLE embed_assets.similar_invalidations (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX similar_invalidations_by_kind ON embed_assets.similar_invalidations (kind, id);

-- Rows whose neighbours are to be computed (again). A table apart from the lists: a mark in a list would be written to
-- the index of all its neighbours.
CREATE TABLE embed_assets.similar_stale (
    kind text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (kind, model_id, source_id)
);

CREATE TABLE embed_assets.search_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    op text NOT NULL CHECK (op IN ('upsert', 'remove')),
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX search_outbox_by_kind ON embed_assets.search_outbox (kind, id);
CREATE INDEX search_outbox_by_source ON embed_assets.search_outbox (kind, source_id, id);

-- Shared by all processes, so that one endpoint's trouble is met once.
CREATE TABLE embed_assets.embedding_endpoints (
    endpoint text PRIMARY KEY,
    state text NOT NULL DEFAULT 'ok' CHECK (state IN ('ok', 'cooling', 'warming', 'refused')),
    until timestamptz,
    reason text,
    warming_since timestamptz,
    -- Most texts of a wave failed alike: by which code, and when that was last laid at the endpoint's door.
    tripped_by text,
    tripped_at timestamptz,
    -- When the next request may be sent, where requests or tokens per minute are limited.
    free_at timestamptz,
    -- The most that one request may hold, as far as it was learned.
    max_items integer,
    max_bytes integer,
    max_chars integer,
    learned_at timestamptz,
    -- The model that it first said it serves, by the name that was configured for it.
    reported jsonb NOT NULL DEFAULT '{}',
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per finished entry.
CREATE TABLE embed_assets.semantic_outbox_log (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    source_id text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    outcome text NOT NULL
    CHECK (outcome IN ('indexed', 'removed', 'gone', 'superseded', 'dead', 'dismissed')),
    reason text NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    claims integer NOT NULL DEFAULT 0,
    chunks integer,
    -- Of these, how many were had without buying; and what the others cost.
    reused integer,
    tokens bigint,
    enqueued_at timestamptz,
    claimed_at timestamptz,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_id text,
    wave_id bigint,
    error_code text,
    error_class text
);
CREATE INDEX semantic_outbox_log_by_source ON embed_assets.semantic_outbox_log (kind, source_id, id);
CREATE INDEX semantic_outbox_log_by_time ON embed_assets.semantic_outbox_log (finished_at);

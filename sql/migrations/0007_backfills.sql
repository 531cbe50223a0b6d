-- Backfills: rows that people ask to embed again, by buckets, so that the Dagster UI can launch and show them.
-- An entry carries the request it answers until it leaves; a bucket is done when none does any more.

-- Always the same bucket for the same id, whatever the server's version or collation.
CREATE FUNCTION embed_assets.bucket_of(source_id text) RETURNS integer
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN get_byte(decode(md5(source_id), 'hex'), 0) & 63;

CREATE TABLE embed_assets.reembed_requests (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text COLLATE "C" NOT NULL,
    bucket integer NOT NULL CHECK (bucket BETWEEN 0 AND 63),
    selection text NOT NULL CHECK (selection IN ('stale', 'all')),
    reason text NOT NULL,
    run_id text NOT NULL,
    -- What its rows are entered for, whoever folds them.
    models integer [] NOT NULL,
    asked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Set when the last of its rows stands in the feed: before, an empty queue says nothing.
    complete_at timestamptz,
    cancelled_at timestamptz,
    rows bigint NOT NULL DEFAULT 0
);
CREATE INDEX reembed_requests_newest ON embed_assets.reembed_requests (kind, bucket, id DESC);

ALTER TABLE embed_assets.source_changes ADD COLUMN request bigint;
CREATE INDEX source_changes_by_request ON embed_assets.source_changes (request) WHERE request IS NOT NULL;
ALTER TABLE embed_assets.semantic_outbox ADD COLUMN request bigint;
CREATE INDEX semantic_outbox_by_request ON embed_assets.semantic_outbox (request) WHERE request IS NOT NULL;

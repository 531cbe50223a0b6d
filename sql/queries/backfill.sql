-- Backfills by buckets: asked for, followed, cancelled, estimated.

-- name: ask
-- For the asker's models that nobody has retired, held so that who retires one meanwhile finds the request.
WITH alive AS MATERIALIZED (
    SELECT m.model_id FROM embed_assets.corpus_models AS m
    WHERE m.kind = %(kind)s AND m.model_id = ANY(%(models)s) AND m.retired_at IS NULL
    ORDER BY m.model_id
    FOR SHARE
)
INSERT INTO embed_assets.reembed_requests (kind, bucket, selection, reason, run_id, models)
SELECT %(kind)s, b.bucket, %(selection)s, %(reason)s, %(run_id)s, ARRAY(SELECT alive.model_id FROM alive)
FROM unnest(%(buckets)s::integer []) AS b (bucket)
WHERE EXISTS (SELECT FROM alive)
ORDER BY b.bucket
RETURNING id, bucket;

-- name: append_range
-- Rows of a range of keys that belong in search and, where only stale ones are wanted, are not what their vectors
-- say. Forced where everything is asked for: vectors that are there already do not count. Appended in lane 1, so that
-- every change goes first. Nothing for a request that was cancelled meanwhile; who cancels it now waits for this.
WITH asked AS MATERIALIZED (
    SELECT r.id, r.bucket, r.models FROM embed_assets.reembed_requests AS r
    WHERE r.id = ANY(%(requests)s) AND r.cancelled_at IS NULL
    ORDER BY r.id
    FOR UPDATE
),

found AS MATERIALIZED (
    SELECT source.source_id, source.indexable, source.revision, source.scope
    FROM {source} AS source
    WHERE
        (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
        AND embed_assets.bucket_of(source.source_id) = ANY(%(buckets)s::integer [])
),

appended AS (
    INSERT INTO embed_assets.source_changes (kind, source_id, reason, forced, lane, scope, request)
    SELECT %(kind)s, f.source_id, 'backfill', %(selection)s = 'all', 1, f.scope, r.id
    FROM found AS f
    INNER JOIN asked AS r ON r.bucket = embed_assets.bucket_of(f.source_id)
    WHERE
        CASE
            WHEN %(selection)s = 'all' THEN f.indexable
            ELSE EXISTS (
                SELECT FROM unnest(r.models) AS m (model_id)
                LEFT JOIN embed_assets.semantic_stamps AS s
                    ON s.kind = %(kind)s AND s.model_id = m.model_id AND s.source_id = f.source_id
                WHERE
                    (f.indexable AND (s.source_id IS NULL OR s.revision IS DISTINCT FROM f.revision))
                    OR (f.indexable IS NOT TRUE AND s.source_id IS NOT NULL)
            )
        END
    ORDER BY f.source_id
    RETURNING request
),

counted AS (
    SELECT a.request, count(*) AS rows FROM appended AS a GROUP BY a.request
)

UPDATE embed_assets.reembed_requests AS q
SET rows = q.rows + c.rows
FROM counted AS c
WHERE q.id = c.request;

-- name: append_unreadable
-- A row that the database cannot read is asked for by its key alone, so that its wave says why.
WITH asked AS MATERIALIZED (
    SELECT r.id, r.bucket FROM embed_assets.reembed_requests AS r
    WHERE r.id = ANY(%(requests)s) AND r.cancelled_at IS NULL
    ORDER BY r.id
    FOR SHARE
)
INSERT INTO embed_assets.source_changes (kind, source_id, reason, forced, lane, request)
SELECT %(kind)s, source.source_id, 'backfill', FALSE, 1, r.id
FROM {source} AS source
INNER JOIN asked AS r ON r.bucket = embed_assets.bucket_of(source.source_id)
WHERE (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
ORDER BY source.source_id;

-- name: complete
WITH asked AS MATERIALIZED (
    SELECT r.id FROM embed_assets.reembed_requests AS r
    WHERE r.id = ANY(%(requests)s) AND r.complete_at IS NULL
    ORDER BY r.id
    FOR UPDATE
)
UPDATE embed_assets.reembed_requests AS q SET complete_at = clock_timestamp()
FROM asked WHERE q.id = asked.id
RETURNING q.bucket, q.rows;

-- name: progress
-- The newest request of each bucket: how many of its rows are still open (in the feed, or entries of some model), and
-- how many failed for good or were given up. By index, as large as what is open.
SELECT
    q.id AS request,
    q.bucket,
    q.selection,
    q.reason,
    q.run_id,
    q.asked_at,
    q.complete_at,
    q.cancelled_at,
    q.rows,
    (SELECT count(*) FROM embed_assets.source_changes AS c WHERE c.request = q.id)
    + (
        SELECT count(*) FROM embed_assets.semantic_outbox AS o
        WHERE o.request = q.id AND o.status <> 'dead'
    ) AS open,
    (
        SELECT count(*) FROM embed_assets.semantic_outbox AS o
        WHERE o.request = q.id AND o.status = 'dead' AND o.dismissed_at IS NULL
    ) AS dead,
    (
        SELECT count(*) FROM embed_assets.semantic_outbox AS o
        WHERE o.request = q.id AND o.status = 'dead' AND o.dismissed_at IS NOT NULL
    ) AS dismissed
FROM generate_series(0, 63) AS b (bucket)
CROSS JOIN LATERAL (
    SELECT * FROM embed_assets.reembed_requests AS r
    WHERE r.kind = %(kind)s AND r.bucket = b.bucket
    ORDER BY r.id DESC
    LIMIT 1
) AS q
ORDER BY q.bucket;

-- name: open_requests
-- A cancelled one too, as long as anything of it is left.
SELECT q.id FROM embed_assets.reembed_requests AS q
WHERE
    q.kind = %(kind)s
    AND (
        (q.complete_at IS NULL AND q.cancelled_at IS NULL)
        OR EXISTS (SELECT FROM embed_assets.source_changes AS c WHERE c.request = q.id)
        OR EXISTS (SELECT FROM embed_assets.semantic_outbox AS o WHERE o.request = q.id AND o.status <> 'dead')
    )
ORDER BY q.id;

-- name: cancel
-- Waits for the range or the fold under way; from then on nothing of these is appended or entered any more.
WITH asked AS MATERIALIZED (
    SELECT r.id FROM embed_assets.reembed_requests AS r
    WHERE r.id = ANY(%(requests)s) AND r.cancelled_at IS NULL
    ORDER BY r.id
    FOR UPDATE
)
UPDATE embed_assets.reembed_requests AS q SET cancelled_at = clock_timestamp()
FROM asked WHERE q.id = asked.id;

-- name: forsake
-- Requests that are not done and of whose models none is left: what they asked for will never be there. Before the
-- entries of the retired model leave, in the order of locks that a fold has.
WITH forsaken AS MATERIALIZED (
    SELECT r.id FROM embed_assets.reembed_requests AS r
    WHERE
        r.kind = %(kind)s AND r.cancelled_at IS NULL
        AND NOT EXISTS (
            SELECT FROM embed_assets.corpus_models AS m
            WHERE m.kind = r.kind AND m.model_id = ANY(r.models) AND m.retired_at IS NULL
        )
        AND (
            r.complete_at IS NULL
            OR EXISTS (SELECT FROM embed_assets.source_changes AS c WHERE c.request = r.id)
            OR EXISTS (SELECT FROM embed_assets.semantic_outbox AS o WHERE o.request = r.id)
        )
    ORDER BY r.id
    FOR UPDATE
)
UPDATE embed_assets.reembed_requests AS q SET cancelled_at = clock_timestamp()
FROM forsaken AS f WHERE q.id = f.id;

-- name: cancel_feed
DELETE FROM embed_assets.source_changes
WHERE ctid = ANY(ARRAY(
    SELECT c.ctid FROM embed_assets.source_changes AS c
    WHERE c.request = ANY(%(requests)s)
    ORDER BY c.id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
));

-- name: cancel_entries
-- What the backfill alone asked for leaves; what was changed meanwhile stays, as an ordinary change. Waits for entries
-- that somebody holds: left alone, they would be bought all the same.
WITH chosen AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id, o.status = 'pending' AND o.lane = 1 AS alone
    FROM embed_assets.semantic_outbox AS o
    WHERE o.request = ANY(%(requests)s)
    ORDER BY o.source_id, o.model_id
    LIMIT %(limit)s
    FOR UPDATE
),

left_alone AS (
    UPDATE embed_assets.semantic_outbox AS o SET request = NULL
    FROM chosen AS c
    WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id AND NOT c.alone
    RETURNING 1 AS one
),

taken AS (
    DELETE FROM embed_assets.semantic_outbox AS o
    USING chosen AS c
    WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id AND c.alone
    RETURNING 1 AS one
)

SELECT
    (SELECT count(*) FROM taken) AS taken,
    (SELECT count(*) FROM left_alone) + (SELECT count(*) FROM taken) AS seen;

-- name: measured
-- What the vectors that are there cost, for an estimate: per stamped row and per chunk.
SELECT
    count(*) AS rows,
    coalesce(sum(s.chunk_count), 0) AS chunks
FROM (
    SELECT t.chunk_count FROM embed_assets.semantic_stamps AS t
    WHERE t.kind = %(kind)s AND t.model_id = %(model_id)s
    LIMIT 100000
) AS s;

-- name: tokens_per_text
SELECT avg(l.tokens)::float8 AS tokens FROM (
    SELECT e.tokens FROM embed_assets.chunk_embeddings AS e
    WHERE e.model_id = %(model_id)s AND e.tokens > 0
    LIMIT 10000
) AS l;

-- name: bytes_per_chunk
-- Of the partition with its indexes, where it holds enough to tell.
SELECT
    (pg_total_relation_size(to_regclass(%(partition)s)) / nullif(c.reltuples, 0))::float8 AS bytes
FROM pg_class AS c
WHERE c.oid = to_regclass(%(partition)s) AND c.reltuples >= 1000;

-- name: indexable_rows
-- How many rows are to be embedded: of all that belong in search, or of those that are not what their vectors say.
SELECT
    count(*) AS indexable,
    count(*) FILTER (WHERE s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision) AS stale
FROM {source} AS source
LEFT JOIN embed_assets.semantic_stamps AS s
    ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
WHERE source.indexable;

-- name: sample_texts
-- Some rows to be cut on trial, where nothing is embedded yet.
SELECT
    source.source_id,
    FALSE AS forced,
    TRUE AS present,
    TRUE AS indexable,
    NULL AS revision,
    FALSE AS stamped,
    coalesce(source.bytes > %(max_bytes)s, FALSE) AS oversize,
    CASE WHEN source.bytes <= %(max_bytes)s THEN source.texts END AS texts,
    source.fields
FROM {source} AS source
WHERE source.indexable
LIMIT %(limit)s;

-- Backfills by buckets: asked for, followed, cancelled, estimated.

-- name: ask
INSERT INTO embed_assets.reembed_requests (kind, bucket, selection, reason, run_id)
SELECT %(kind)s, b.bucket, %(selection)s, %(reason)s, %(run_id)s
FROM unnest(%(buckets)s::integer []) AS b (bucket)
ORDER BY b.bucket
RETURNING id, bucket;

-- name: append_range
-- Rows of a range of keys that belong in search and, where only stale ones are wanted, are not what their vectors
-- say. Forced where everything is asked for: vectors that are there already do not count. Appended in lane 1, so that
-- every change goes first.
WITH found AS MATERIALIZED (
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
    INNER JOIN unnest(%(buckets)s::integer [], %(requests)s::bigint []) AS r (bucket, id)
        ON r.bucket = embed_assets.bucket_of(f.source_id)
    WHERE
        CASE
            WHEN %(selection)s = 'all' THEN f.indexable
            ELSE EXISTS (
                SELECT FROM unnest(%(models)s::integer []) AS m (model_id)
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
INSERT INTO embed_assets.source_changes (kind, source_id, reason, forced, lane, request)
SELECT %(kind)s, source.source_id, 'backfill', FALSE, 1, r.id
FROM {source} AS source
INNER JOIN unnest(%(buckets)s::integer [], %(requests)s::bigint []) AS r (bucket, id)
    ON r.bucket = embed_assets.bucket_of(source.source_id)
WHERE (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
ORDER BY source.source_id;

-- name: complete
UPDATE embed_assets.reembed_requests SET complete_at = clock_timestamp()
WHERE id = ANY(%(requests)s) AND complete_at IS NULL
RETURNING bucket, rows;

-- name: progress
-- The newest request of each bucket: how many of its rows are still open (in the feed, or entries of some model), and
-- how many failed for good. By index, as large as what is open.
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
    ) AS dead
FROM generate_series(0, 63) AS b (bucket)
CROSS JOIN LATERAL (
    SELECT * FROM embed_assets.reembed_requests AS r
    WHERE r.kind = %(kind)s AND r.bucket = b.bucket
    ORDER BY r.id DESC
    LIMIT 1
) AS q
ORDER BY q.bucket;

-- name: open_requests
SELECT q.id FROM embed_assets.reembed_requests AS q
WHERE
    q.kind = %(kind)s AND q.cancelled_at IS NULL
    AND (
        q.complete_at IS NULL
        OR EXISTS (SELECT FROM embed_assets.source_changes AS c WHERE c.request = q.id)
        OR EXISTS (SELECT FROM embed_assets.semantic_outbox AS o WHERE o.request = q.id AND o.status <> 'dead')
    )
ORDER BY q.id;

-- name: cancel
UPDATE embed_assets.reembed_requests SET cancelled_at = clock_timestamp()
WHERE id = ANY(%(requests)s) AND cancelled_at IS NULL;

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
-- What the backfill alone asked for leaves; what was changed meanwhile stays, as an ordinary change. Held entries are
-- taken in the next round.
WITH chosen AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id, o.status = 'pending' AND o.lane = 1 AS alone
    FROM embed_assets.semantic_outbox AS o
    WHERE o.request = ANY(%(requests)s)
    ORDER BY o.source_id, o.model_id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
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

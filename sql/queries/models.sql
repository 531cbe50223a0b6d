-- The life of a model of one kind: built beside the active one, indexed, judged, switched to, retired, dropped.
-- What is maintained, searched and dropped is decided by one row of corpora and the facts of corpus_models.

-- name: standing
-- What a process finds when it starts with this model: the kind's active one, and whether this one was retired.
SELECT
    coalesce(c.active_model_id = %(model_id)s, FALSE) AS active,
    coalesce(c.target_model_id = %(model_id)s, FALSE) AS target,
    cm.retired_at,
    coalesce(cm.dropped_at IS NOT NULL, TRUE) AS dropped
FROM embed_assets.corpora AS c
LEFT JOIN embed_assets.corpus_models AS cm ON cm.kind = c.kind AND cm.model_id = %(model_id)s
WHERE c.kind = %(kind)s;

-- name: lock_kind
-- Pause, switch, rollback, a new target and a drop wait for the writes under way; every later write waits for them.
-- A statement of its own: what it would read beside the lock is of the time before it had the lock.
SELECT pg_advisory_xact_lock(1701667428, c.lock_id) AS held
FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s;

-- name: add_corpus_model
INSERT INTO embed_assets.corpus_models (kind, model_id)
VALUES (%(kind)s, %(model_id)s)
ON CONFLICT (kind, model_id) DO UPDATE SET dropped_at = NULL
WHERE corpus_models.dropped_at IS NOT NULL;

-- name: set_target
-- The first model is active at once; a later one is built beside it.
UPDATE embed_assets.corpora
SET
    target_model_id = %(model_id)s,
    target_since = clock_timestamp(),
    active_model_id = coalesce(active_model_id, %(model_id)s)
WHERE kind = %(kind)s AND target_model_id IS DISTINCT FROM %(model_id)s;

-- name: retire_unfinished
-- A target that is given up before search read it.
UPDATE embed_assets.corpus_models AS m
SET retired_at = clock_timestamp(), unmet = NULL
FROM embed_assets.corpora AS c
WHERE
    m.kind = %(kind)s AND c.kind = m.kind AND m.retired_at IS NULL
    AND m.model_id <> c.active_model_id AND m.model_id <> c.target_model_id
RETURNING m.model_id;

-- name: maintained
-- Of a process' models those that nobody has retired since it started. Work for a model that search does not read yet
-- stands behind everybody's changes, in lane 1.
SELECT
    m.model_id,
    (m.model_id IS DISTINCT FROM c.active_model_id)::integer AS lane
FROM embed_assets.corpus_models AS m INNER JOIN embed_assets.corpora AS c ON c.kind = m.kind
WHERE m.kind = %(kind)s AND m.model_id = ANY(%(models)s) AND m.retired_at IS NULL
ORDER BY m.model_id;

-- name: supersede
-- A retired model's entries leave; each is logged, as every finished entry is.
WITH left_over AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id
    FROM embed_assets.semantic_outbox AS o
    WHERE o.kind = %(kind)s AND o.model_id = %(model_id)s
    ORDER BY o.source_id
    FOR UPDATE
),

gone AS (
    DELETE FROM embed_assets.semantic_outbox AS o
    USING left_over AS l
    WHERE o.kind = l.kind AND o.source_id = l.source_id AND o.model_id = l.model_id
    RETURNING o.*
)

INSERT INTO embed_assets.semantic_outbox_log
(kind, source_id, model_id, outcome, reason, claims, attempts, enqueued_at, wave_id)
SELECT g.kind, g.source_id, g.model_id, 'superseded', g.reason, g.claims, g.attempts, g.enqueued_at, g.wave_id
FROM gone AS g
ORDER BY g.source_id;

-- name: switch
-- One row decides what search reads. The model of before stays, complete, for a rollback.
UPDATE embed_assets.corpora
SET
    previous_model_id = active_model_id,
    active_model_id = %(model_id)s,
    target_model_id = %(model_id)s,
    target_since = clock_timestamp()
WHERE kind = %(kind)s;

-- name: retire
UPDATE embed_assets.corpus_models SET retired_at = clock_timestamp(), unmet = NULL
WHERE kind = %(kind)s AND model_id = %(model_id)s AND retired_at IS NULL;

-- name: unretire
UPDATE embed_assets.corpus_models SET retired_at = NULL
WHERE kind = %(kind)s AND model_id = %(model_id)s;

-- name: admit
-- An operator's word that a retired model may be built or used again.
UPDATE embed_assets.corpus_models AS cm
SET retired_at = NULL, unmet = NULL, judged_at = NULL
FROM embed_assets.embedding_models AS m
WHERE cm.kind = %(kind)s AND m.id = cm.model_id AND m.identity = %(identity)s AND cm.retired_at IS NOT NULL
RETURNING cm.model_id;

-- name: models_of
-- Every model of a kind with its facts, the newest last.
SELECT
    m.id AS model_id,
    m.identity,
    m.dimensions,
    cm.index_ready,
    cm.added_at,
    cm.judged_at,
    cm.unmet,
    cm.retired_at,
    cm.dropped_at,
    coalesce(c.active_model_id = m.id, FALSE) AS active,
    coalesce(c.target_model_id = m.id, FALSE) AS target,
    coalesce(c.previous_model_id = m.id, FALSE) AS previous,
    c.target_since,
    (
        SELECT count(*) FROM embed_assets.semantic_stamps AS s WHERE s.kind = cm.kind AND s.model_id = cm.model_id
    ) AS stamped
FROM embed_assets.corpus_models AS cm
INNER JOIN embed_assets.embedding_models AS m ON m.id = cm.model_id
INNER JOIN embed_assets.corpora AS c ON c.kind = cm.kind
WHERE cm.kind = %(kind)s
ORDER BY m.id;

-- name: coverage
-- Each row that belongs in search once: `rows` in all, of which `dead` ones failed for good. `missing` ones are neither
-- dead nor stamped, or by an older text than the active model's: with the target, search would go back to that. `lost`
-- ones are among the missing, and only the active model finds them. What the entry and the stamps say comes first: a
-- row that cannot be read is judged by them. A row that neither model has followed yet is no worse off with the target.
SELECT
    count(*) FILTER (WHERE counted.state <> 'excluded') AS rows,
    count(*) FILTER (WHERE counted.state = 'dead') AS dead,
    count(*) FILTER (WHERE counted.state IN ('missing', 'lost')) AS missing,
    count(*) FILTER (WHERE counted.state = 'lost') AS lost
FROM (
    SELECT
        CASE
            WHEN o.status = 'dead' AND o.dismissed_at IS NULL THEN 'dead'
            WHEN o.status = 'dead' THEN 'stamped'
            WHEN s.revision IS DISTINCT FROM a.revision AND s.embedded_at < a.embedded_at
                THEN CASE WHEN s.chunk_count = 0 AND a.chunk_count > 0 THEN 'lost' ELSE 'missing' END
            WHEN s.source_id IS NOT NULL THEN 'stamped'
            WHEN source.indexable AND a.chunk_count > 0 THEN 'lost'
            WHEN source.indexable THEN 'missing'
            ELSE 'excluded'
        END AS state
    FROM {source} AS source
    LEFT JOIN embed_assets.semantic_stamps AS s
        ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
    LEFT JOIN embed_assets.semantic_stamps AS a
        ON a.kind = %(kind)s AND a.model_id = %(active_id)s AND a.source_id = source.source_id
    LEFT JOIN embed_assets.semantic_outbox AS o
        ON o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = source.source_id
) AS counted;

-- name: index_state
-- The partition's index: is it there, is it usable, is somebody building it now (then how far, 0 to 1).
SELECT
    i.indexrelid IS NOT NULL AS present,
    coalesce(i.indisvalid AND i.indisready, FALSE) AS valid,
    p.pid IS NOT NULL AS building,
    CASE
        WHEN p.phase LIKE 'building index%%' THEN coalesce(p.blocks_done::float8 / nullif(p.blocks_total, 0), 0)
        WHEN p.phase IN ('initializing', 'waiting for writers before build') OR p.phase IS NULL THEN 0
        ELSE 1
    END::float8 AS done
FROM (SELECT to_regclass(%(partition)s) AS relation, to_regclass(%(index)s) AS index) AS named
LEFT JOIN pg_index AS i ON i.indexrelid = named.index
LEFT JOIN pg_stat_progress_create_index AS p ON p.relid = named.relation AND p.datname = current_database();

-- name: index_memory
-- HNSW is built fastest when the graph fits; what the server grants already is not lowered.
SELECT set_config(
    'maintenance_work_mem',
    greatest(pg_size_bytes(current_setting('maintenance_work_mem')), %(bytes)s::bigint) / 1024 || 'kB',
    FALSE
);

-- name: create_index
-- Built after the load, which is several times faster than inserting into a live index; people read and write on.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {index} ON {partition}
USING hnsw ((embedding::{type}({dimensions})) {operators});

-- name: drop_index
DROP INDEX CONCURRENTLY IF EXISTS {index_path};

-- name: analyze
ANALYZE {partition};

-- name: index_is_ready
UPDATE embed_assets.corpus_models SET index_ready = %(ready)s
WHERE kind = %(kind)s AND model_id = %(model_id)s AND index_ready <> %(ready)s;

-- name: sample
-- Vectors that search may be asked about, spread over the partition.
SELECT c.embedding FROM {partition} AS c TABLESAMPLE bernoulli (%(percent)s) LIMIT %(size)s;

-- name: chunks_estimate
SELECT greatest(c.reltuples, 0)::bigint AS chunks FROM pg_class AS c WHERE c.oid = to_regclass(%(partition)s);

-- name: distances
-- The ten nearest chunks' distances, by the index or, with index scans off, exactly.
SELECT array_agg(near.distance ORDER BY near.distance) AS distances
FROM (
    SELECT (c.embedding::{type}({dimensions})) <=> %(query)s::{type}({dimensions}) AS distance
    FROM {partition} AS c
    ORDER BY (c.embedding::{type}({dimensions})) <=> %(query)s::{type}({dimensions})
    LIMIT %(k)s
) AS near;

-- name: choose_scan
-- For one transaction: the same question answered by the index or by reading everything.
SELECT set_config('enable_indexscan', %(index)s, TRUE), set_config('enable_seqscan', %(table)s, TRUE);

-- name: note_judgement
UPDATE embed_assets.corpus_models SET judged_at = clock_timestamp(), unmet = %(unmet)s
WHERE kind = %(kind)s AND model_id = %(model_id)s;

-- name: to_drop
-- Retired for so many days: its partition may go. Never the active one, never the target. Asked once more under the
-- kind's lock, of one model.
SELECT cm.model_id
FROM embed_assets.corpus_models AS cm INNER JOIN embed_assets.corpora AS c ON c.kind = cm.kind
WHERE
    cm.kind = %(kind)s AND cm.dropped_at IS NULL
    AND cm.retired_at <= clock_timestamp() - %(days)s * interval '1 day'
    AND cm.model_id IS DISTINCT FROM c.active_model_id AND cm.model_id IS DISTINCT FROM c.target_model_id
    AND (cm.model_id = %(model_id)s OR %(model_id)s::integer IS NULL)
ORDER BY cm.model_id;

-- name: dropped_with_stamps
-- Dropped by a process that died before it had forgotten what the partition held.
SELECT cm.model_id FROM embed_assets.corpus_models AS cm
WHERE
    cm.kind = %(kind)s AND cm.dropped_at IS NOT NULL
    AND EXISTS (SELECT FROM embed_assets.semantic_stamps AS s WHERE s.kind = cm.kind AND s.model_id = cm.model_id)
ORDER BY cm.model_id;

-- name: forget_all_stamps
DELETE FROM embed_assets.semantic_stamps WHERE kind = %(kind)s AND model_id = %(model_id)s;

-- name: holds_chunks
SELECT EXISTS (
    SELECT FROM embed_assets.semantic_stamps
    WHERE kind = %(kind)s AND model_id = %(model_id)s AND chunk_count > 0
) AS stamped;

-- name: try_to_build
-- One builder for each partition: two at once would wait for each other. Held by the session that builds.
SELECT pg_try_advisory_lock(1701667431, (to_regclass(%(partition)s)::oid::bigint - 2147483648)::integer) AS mine;

-- name: drop_partition
DROP TABLE IF EXISTS {partition};

-- name: note_dropped
WITH forgotten AS (
    UPDATE embed_assets.corpora SET previous_model_id = NULL
    WHERE kind = %(kind)s AND previous_model_id = %(model_id)s
)

UPDATE embed_assets.corpus_models
SET dropped_at = clock_timestamp(), index_ready = FALSE
WHERE kind = %(kind)s AND model_id = %(model_id)s;

-- name: forget_stamps
DELETE FROM embed_assets.semantic_stamps
WHERE ctid = ANY(ARRAY(
    SELECT s.ctid FROM embed_assets.semantic_stamps AS s
    WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s
    ORDER BY s.source_id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
));

-- name: waiting
-- What a sensor asks: models whose index is not built or, being the target, that search does not read; whose load is
-- all but done (at most one row in a hundred pending); and that nobody judged since anything of them was written. All
-- by index, whatever the size of the queue.
SELECT m.model_id
FROM embed_assets.corpora AS c
INNER JOIN embed_assets.corpus_models AS m ON m.kind = c.kind AND m.model_id IN (c.active_model_id, c.target_model_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS stamps FROM embed_assets.semantic_stamps AS s
    WHERE s.kind = m.kind AND s.model_id = m.model_id
) AS loaded
WHERE
    c.kind = %(kind)s AND m.retired_at IS NULL
    AND (NOT m.index_ready OR ((%(automatic)s OR m.unmet IS NOT NULL) AND m.model_id <> c.active_model_id))
    AND loaded.stamps > 0
    AND (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox AS o
            WHERE o.kind = m.kind AND o.model_id = m.model_id AND o.status = 'pending'
            LIMIT greatest(10, loaded.stamps / 100) + 1
        ) AS bounded
    ) <= greatest(10, loaded.stamps / 100)
    AND (
        m.judged_at IS NULL
        OR m.judged_at <= clock_timestamp() - interval '1 hour'
        OR (
            m.judged_at <= clock_timestamp() - interval '30 seconds'
            AND EXISTS (
                SELECT FROM embed_assets.claimed_waves AS w
                WHERE w.kind = m.kind AND w.model_id = m.model_id AND w.closed_at > m.judged_at
            )
        )
    )
ORDER BY m.model_id;

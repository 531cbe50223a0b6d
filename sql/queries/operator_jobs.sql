-- What an operator's jobs ask and do beyond the queue's own transitions (operate.sql).

-- name: known_kind
SELECT TRUE AS known FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s;

-- name: out_of_sync
-- Rows that the stamps call stale, each once: never embedded, another revision, or to be cleared. Judged by stamps
-- alone; what is on its way already, or was given up, is left to itself. ids: only these.
SELECT source.source_id
FROM {source} AS source
LEFT JOIN embed_assets.semantic_stamps AS s
    ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
LEFT JOIN embed_assets.semantic_outbox AS o
    ON o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = source.source_id
WHERE
    CASE
        WHEN o.status IN ('pending', 'leased') OR o.dismissed_at IS NOT NULL THEN FALSE
        WHEN source.indexable THEN s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision
        ELSE s.source_id IS NOT NULL
    END
    AND (source.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
UNION ALL
SELECT s.source_id
FROM embed_assets.semantic_stamps AS s
LEFT JOIN embed_assets.semantic_outbox AS o
    ON o.kind = s.kind AND o.model_id = s.model_id AND o.source_id = s.source_id
WHERE
    s.kind = %(kind)s AND s.model_id = %(model_id)s
    AND coalesce(o.status NOT IN ('pending', 'leased') AND o.dismissed_at IS NULL, TRUE)
    AND NOT EXISTS (SELECT FROM {source} AS source WHERE source.key = {s_key})
    AND (s.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)

-- name: present
-- Of these ids, the rows that the source holds, in sync or not: what is forced.
SELECT source.source_id FROM {source} AS source WHERE source.source_id = ANY(%(ids)s)

-- name: count
SELECT count(*) AS rows FROM ({chosen}) AS chosen;

-- name: request
-- Entered like any other change, so that whatever was parked runs again, with all its attempts.
SELECT embed_assets.enqueue(
    %(kind)s,
    coalesce(array_agg(chosen.source_id ORDER BY chosen.source_id), '{{}}'),
    'manual',
    %(forced)s
) AS rows
FROM ({chosen}) AS chosen;

-- name: open_waves
-- What `release_waves` would take: by run, or those whose lease has run out, or all.
SELECT
    w.run_id,
    count(*) AS waves,
    sum(w.claimed)::bigint AS rows,
    bool_or(w.lease_until <= clock_timestamp()) AS expired
FROM embed_assets.claimed_waves AS w
WHERE
    w.kind = %(kind)s AND w.closed_at IS NULL
    AND (w.run_id = %(run_id)s OR %(run_id)s::text IS NULL)
    AND (NOT %(expired)s OR w.lease_until <= clock_timestamp())
GROUP BY w.run_id
ORDER BY w.run_id;

-- name: lapse
-- The leases of runs that are known to be dead run out now. The process may live all the same: whatever it renews or
-- writes is refused, as after any lost lease. A wave that is being written holds its row and is skipped.
WITH dead AS MATERIALIZED (
    SELECT w.wave_id, w.token FROM embed_assets.claimed_waves AS w
    WHERE
        w.kind = %(kind)s AND w.run_id = ANY(%(runs)s) AND w.closed_at IS NULL AND w.lease_until > clock_timestamp()
    ORDER BY w.wave_id
    FOR UPDATE SKIP LOCKED
)
UPDATE embed_assets.claimed_waves AS w
SET lease_until = clock_timestamp()
FROM dead AS d
WHERE w.wave_id = d.wave_id AND w.token = d.token;

-- name: endpoints
SELECT e.state, e.reason, greatest(extract(EPOCH FROM e.until - clock_timestamp()), 0)::float8 AS seconds
FROM embed_assets.embedding_endpoints AS e
WHERE e.endpoint = ANY(%(endpoints)s)
ORDER BY e.endpoint;

-- name: reset_endpoints
UPDATE embed_assets.embedding_endpoints AS e
SET
    state = 'ok',
    until = NULL,
    reason = NULL,
    warming_since = NULL,
    tripped_by = NULL,
    tripped_at = NULL,
    reported = '{{}}',
    max_items = CASE WHEN %(limits)s THEN NULL ELSE e.max_items END,
    max_bytes = CASE WHEN %(limits)s THEN NULL ELSE e.max_bytes END,
    max_chars = CASE WHEN %(limits)s THEN NULL ELSE e.max_chars END,
    updated_at = clock_timestamp()
WHERE e.endpoint = ANY(%(endpoints)s);

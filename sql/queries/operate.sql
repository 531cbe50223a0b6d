-- What an operator does with the queue. Each is one statement, ordered by key.

-- name: count_dead
-- What a retry or a dismissal with these filters would take; the dry run.
SELECT
    e.error_code,
    e.error_class,
    count(*) AS rows,
    min(e.source_id) AS sample,
    min(e.first_failed_at) AS first_failed_at,
    max(e.last_failed_at) AS last_failed_at
FROM embed_assets.semantic_outbox AS e
WHERE
    e.kind = %(kind)s AND e.status = 'dead' AND e.dismissed_at IS NULL
    AND (%(code)s IN (e.error_code, e.error_class) OR %(code)s::text IS NULL)
    AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
GROUP BY e.error_code, e.error_class
ORDER BY count(*) DESC, e.error_code;

-- name: count_waiting
-- What failed and is tried again by itself.
SELECT
    e.error_code,
    e.error_class,
    count(*) AS rows,
    min(e.source_id) AS sample,
    min(e.next_attempt_at) AS next_attempt_at
FROM embed_assets.semantic_outbox AS e
WHERE
    e.kind = %(kind)s AND e.status = 'retry_wait'
    AND (%(code)s IN (e.error_code, e.error_class) OR %(code)s::text IS NULL)
GROUP BY e.error_code, e.error_class
ORDER BY count(*) DESC, e.error_code;

-- name: list_dead
-- One by one, the newest failure first. Nothing in a prefix is a pattern.
SELECT
    d.source_id,
    m.identity AS model,
    d.error_code,
    d.error_class,
    d.error_message,
    d.occurrences,
    d.first_failed_at,
    d.last_failed_at,
    d.last_success_at,
    CASE WHEN isfinite(d.parked_until) THEN d.parked_until END AS parked_until
FROM embed_assets.dead_letters AS d
INNER JOIN embed_assets.embedding_models AS m ON m.id = d.model_id
WHERE
    d.kind = %(kind)s AND d.dismissed_at IS NULL
    AND (%(code)s IN (d.error_code, d.error_class) OR %(code)s::text IS NULL)
    AND (d.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
    AND (starts_with(d.source_id, %(prefix)s) OR %(prefix)s::text IS NULL)
ORDER BY d.last_failed_at DESC, d.source_id
LIMIT %(limit)s;

-- name: last_activity
SELECT greatest(
    (SELECT max(l.finished_at) FROM embed_assets.semantic_outbox_log AS l WHERE l.kind = %(kind)s),
    (SELECT max(w.claimed_at) FROM embed_assets.claimed_waves AS w WHERE w.kind = %(kind)s),
    (SELECT max(e.last_failed_at) FROM embed_assets.semantic_outbox AS e WHERE e.kind = %(kind)s)
) AS at;

-- name: retry_dead
-- An operator's retry is a request: whatever was parked, it runs now, with all its attempts.
WITH chosen AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    WHERE
        e.kind = %(kind)s AND e.status = 'dead' AND e.dismissed_at IS NULL
        AND (%(code)s IN (e.error_code, e.error_class) OR %(code)s::text IS NULL)
        AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
    ORDER BY e.source_id, e.model_id
    LIMIT %(limit)s
    FOR UPDATE OF e SKIP LOCKED
)
UPDATE embed_assets.semantic_outbox AS o
SET
    status = 'pending',
    attempts = 0,
    crashes = 0,
    timeouts = 0,
    deaths = 0,
    next_attempt_at = NULL,
    lane = 0,
    reason = 'manual',
    requested_at = clock_timestamp()
FROM chosen AS c
WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id;

-- name: dismiss_dead
-- Given up: dead, uncounted, until its source changes or somebody requests it. Logged once.
WITH chosen AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    WHERE
        e.kind = %(kind)s AND e.status = 'dead' AND e.dismissed_at IS NULL
        AND (%(code)s IN (e.error_code, e.error_class) OR %(code)s::text IS NULL)
        AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
    ORDER BY e.source_id, e.model_id
    LIMIT %(limit)s
    FOR UPDATE OF e SKIP LOCKED
),

dismissed AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET dismissed_at = clock_timestamp()
    FROM chosen AS c
    WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id
    RETURNING o.*
)

INSERT INTO embed_assets.semantic_outbox_log
(kind, source_id, model_id, outcome, reason, claims, attempts, enqueued_at, wave_id, error_code, error_class)
SELECT
    d.kind, d.source_id, d.model_id, 'dismissed', d.reason, d.claims, d.attempts, d.enqueued_at, d.wave_id,
    d.error_code, d.error_class
FROM dismissed AS d
ORDER BY d.source_id;

-- name: cancel_pending
-- Takes back what nobody has begun; a leased, waiting or dead entry is not touched. Rows that are stale all the
-- same come back with the next scan. What a backfill asked for too stays, as the backfill's: only its own cancelling
-- (backfill.cancel) takes it back, or its bucket would be called done.
WITH chosen AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id, e.request
    FROM embed_assets.semantic_outbox AS e
    WHERE
        e.kind = %(kind)s AND e.status = 'pending' AND e.reason = %(reason)s
        AND (e.request IS NULL OR e.reason <> 'backfill')
    ORDER BY e.source_id, e.model_id
    LIMIT %(limit)s
    FOR UPDATE OF e SKIP LOCKED
),

left_alone AS (
    UPDATE embed_assets.semantic_outbox AS o SET reason = 'backfill', lane = 1
    FROM chosen AS c
    WHERE
        o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id AND c.request IS NOT NULL
    RETURNING 1 AS one
),

taken AS (
    DELETE FROM embed_assets.semantic_outbox AS o
    USING chosen AS c
    WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id AND c.request IS NULL
    RETURNING 1 AS one
)

SELECT
    (SELECT count(*) FROM taken) AS taken,
    (SELECT count(*) FROM left_alone) + (SELECT count(*) FROM taken) AS seen;

-- name: pause
UPDATE embed_assets.corpora SET paused_at = clock_timestamp() WHERE kind = %(kind)s AND paused_at IS NULL;

-- name: resume
UPDATE embed_assets.corpora SET paused_at = NULL WHERE kind = %(kind)s AND paused_at IS NOT NULL;

-- name: latency
-- From the log: seconds from enqueued to finished of what was indexed, by quantile.
SELECT
    count(*) AS indexed,
    percentile_cont(0.5) WITHIN GROUP (ORDER BY l.seconds) AS p50,
    percentile_cont(0.95) WITHIN GROUP (ORDER BY l.seconds) AS p95,
    percentile_cont(0.99) WITHIN GROUP (ORDER BY l.seconds) AS p99
FROM (
    SELECT extract(EPOCH FROM entry.finished_at - entry.enqueued_at)::float8 AS seconds
    FROM embed_assets.semantic_outbox_log AS entry
    WHERE
        entry.kind = %(kind)s AND entry.outcome = 'indexed'
        AND entry.finished_at > clock_timestamp() - %(hours)s * interval '1 hour'
) AS l;

-- What the asset checks read. Nothing here changes anything, and nothing grows with the table: counts are bounded,
-- what is compared is sampled, and the session's statement time-out ends the rest.

-- name: oldest_due
-- How long the oldest change waits: an entry that may be claimed now, or one in the feed. Backfills (lane 1) may wait.
SELECT
    (
        SELECT extract(EPOCH FROM clock_timestamp() - min(o.enqueued_at))::float8
        FROM embed_assets.semantic_outbox AS o
        WHERE o.kind = %(kind)s AND o.status = 'pending' AND o.lane = 0
    ) AS entry_seconds,
    (
        SELECT extract(EPOCH FROM clock_timestamp() - min(c.at))::float8
        FROM embed_assets.source_changes AS c
        WHERE c.kind = %(kind)s AND c.lane = 0
    ) AS feed_seconds,
    coalesce((SELECT c.paused_at IS NOT NULL FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s), FALSE) AS paused;

-- name: leases
-- A lease that has just run out is taken back by the next claim; one that stays so means that nobody claims.
SELECT
    count(*) FILTER (WHERE w.lease_until > clock.now) AS held,
    count(*) FILTER (WHERE w.lease_until <= clock.now) AS expired,
    coalesce(max(extract(EPOCH FROM clock.now - w.lease_until)), 0)::float8 AS oldest_seconds
FROM embed_assets.claimed_waves AS w
CROSS JOIN (SELECT clock_timestamp() AS now) AS clock
WHERE w.kind = %(kind)s AND w.closed_at IS NULL;

-- name: stamps_and_chunks
-- Of a sample of stamps, those whose chunks are not all there. The sample is a run of neighbours from a random place
-- on, and from the start where that is too near the end.
WITH stamped AS MATERIALIZED (
    (
        SELECT s.source_id, s.chunk_count FROM embed_assets.semantic_stamps AS s
        WHERE s.kind = %(kind)s AND s.model_id = {model_id} AND s.source_id >= %(from)s
        ORDER BY s.source_id
        LIMIT %(size)s
    )
    UNION
    (
        SELECT s.source_id, s.chunk_count FROM embed_assets.semantic_stamps AS s
        WHERE s.kind = %(kind)s AND s.model_id = {model_id}
        ORDER BY s.source_id
        LIMIT %(size)s
    )
)

SELECT
    count(*) AS sampled,
    count(*) FILTER (
        WHERE s.chunk_count <> (SELECT count(*) FROM {partition} AS c WHERE c.{key} = {s_key})
    ) AS wrong
FROM stamped AS s;

-- name: random_stamp
-- Somewhere among the stamps, by a random page: no order, no count.
SELECT s.source_id FROM embed_assets.semantic_stamps AS s TABLESAMPLE system (%(percent)s)
WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s
LIMIT 1;

-- name: stamps_estimate
SELECT greatest(c.reltuples, 1)::float8 AS rows FROM pg_class AS c
WHERE c.oid = 'embed_assets.semantic_stamps'::regclass;

-- name: vector_space
-- The partition's CHECKs keep strangers out; they may have been dropped, so a sample of the vectors is measured too.
SELECT
    (
        SELECT count(*) FROM pg_constraint AS c
        WHERE
            c.conrelid = to_regclass(%(name)s) AND c.contype = 'c' AND c.convalidated
            AND c.conname IN ('one_model', 'own_width')
    ) AS checks,
    count(*) AS sampled,
    count(*) FILTER (WHERE vector_dims(v.embedding) <> %(dimensions)s) AS wrong_width,
    count(*) FILTER (WHERE v.model_id <> %(model_id)s) AS wrong_model
FROM (SELECT c.embedding, c.model_id FROM {partition} AS c LIMIT %(size)s) AS v;

-- name: oldest_snapshot
-- Who keeps dead rows from being cleaned away: a transaction, a prepared one, a replication slot. The seconds are those
-- of a transaction; a slot has none. Autovacuum holds nobody up. Of other roles' sessions a role sees this only as a
-- member of pg_monitor.
SELECT who.what, who.seconds, who.age
FROM (
    SELECT
        'session ' || a.pid || ' (' || coalesce(nullif(a.application_name, ''), 'unnamed') || ', '
        || coalesce(a.state, 'unknown') || ')' AS what,
        extract(EPOCH FROM clock_timestamp() - coalesce(a.xact_start, a.query_start))::float8 AS seconds,
        age(a.backend_xmin) AS age
    FROM pg_stat_activity AS a
    WHERE
        a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid() AND a.backend_type <> 'autovacuum worker'
        AND (a.datname = current_database() OR a.datname IS NULL)
    UNION ALL
    SELECT
        'prepared transaction ' || p.gid,
        extract(EPOCH FROM clock_timestamp() - p.prepared)::float8,
        age(p.transaction)
    FROM pg_prepared_xacts AS p
    WHERE p.database = current_database()
    UNION ALL
    SELECT 'replication slot ' || r.slot_name, NULL::float8, age(r.xmin)
    FROM pg_replication_slots AS r
    WHERE r.xmin IS NOT NULL
) AS who
ORDER BY who.age DESC NULLS LAST, who.seconds DESC NULLS LAST
LIMIT 1;

-- name: feed
-- How much waits in a feed that others consume, counted up to 10,000, and for how long the oldest does.
SELECT f.rows, f.oldest_seconds AS seconds FROM embed_assets.feed_metrics AS f
WHERE f.kind = %(kind)s AND f.feed = %(feed)s;

-- name: stamps
-- Rows that a model holds, counted up to a limit.
SELECT count(*) AS rows FROM (
    SELECT FROM embed_assets.semantic_stamps AS s
    WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s
    LIMIT %(limit)s
) AS bounded;

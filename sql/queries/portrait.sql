-- What the pictures and tables on the chunk asset show. Bounded, and given up in half a second: nobody waits for them.

-- name: patience
SELECT set_config('statement_timeout', %(milliseconds)s, TRUE);

-- name: latencies
-- Seconds from enqueued to searchable, of the newest rows of the last day.
SELECT extract(EPOCH FROM l.finished_at - l.enqueued_at)::float8 AS seconds
FROM embed_assets.semantic_outbox_log AS l
WHERE
    l.kind = %(kind)s AND l.outcome = 'indexed' AND l.enqueued_at IS NOT NULL
    AND l.finished_at > clock_timestamp() - interval '1 day'
ORDER BY l.finished_at DESC
LIMIT %(size)s;

-- name: vectors
-- Some vectors of the partition, from pages picked at random, each with the fields of its row that stand in the prefix.
SELECT v.embedding, source.fields
FROM (
    SELECT c.{key} AS key, c.embedding FROM {partition} AS c TABLESAMPLE system (%(percent)s) LIMIT %(size)s
) AS v
INNER JOIN {source} AS source ON source.key = v.key;

-- name: waves
SELECT
    w.wave_id AS wave,
    w.claimed,
    w.indexed,
    w.removed + w.gone AS removed,
    w.failed,
    w.dead,
    w.texts,
    w.reused,
    round(w.stage_seconds::numeric, 2)::float8 AS stage_seconds,
    round(w.write_seconds::numeric, 2)::float8 AS write_seconds
FROM embed_assets.claimed_waves AS w
WHERE w.kind = %(kind)s AND w.run_id = %(run_id)s
ORDER BY w.wave_id
LIMIT %(size)s;

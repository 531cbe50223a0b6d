-- What a sensor or a schedule reads before it asks for a run. Nothing here changes anything.

-- name: scan_state
-- busy: an enqueuer is at work, so a second one would skip; what is in the feed or stale is its business now.
SELECT
    coalesce(s.until > clock_timestamp(), FALSE) AS busy,
    extract(EPOCH FROM clock_timestamp() - s.last_scan_at)::float8 AS scanned_seconds_ago
FROM embed_assets.corpus_scans AS s
WHERE s.kind = %(kind)s;

-- name: waves_of_runs
-- Which of these runs have claimed anything, and which of them hold a lease now.
SELECT w.run_id, bool_or(w.closed_at IS NULL AND w.lease_until > clock_timestamp()) AS holding
FROM embed_assets.claimed_waves AS w
WHERE w.kind = %(kind)s AND w.run_id = ANY(%(runs)s)
GROUP BY w.run_id;

-- name: listen
LISTEN semantic_outbox;

-- name: invalidations
-- Rows whose neighbours wait to be computed again, counted up to a limit.
SELECT count(*) AS waiting FROM (
    SELECT FROM embed_assets.similar_invalidations WHERE kind = %(kind)s LIMIT %(limit)s
) AS bounded;

-- name: invalidated_by
-- What the waves of one run settled, each row of which was appended to similar_invalidations.
SELECT coalesce(sum(w.indexed + w.removed + w.gone + w.superseded), 0)::bigint AS invalidated
FROM embed_assets.claimed_waves AS w
WHERE w.kind = %(kind)s AND w.run_id = %(run_id)s;

-- name: failed_since
-- One row when an entry failed since then: a run that only met failures was not idle.
SELECT 1 AS failed FROM embed_assets.semantic_outbox AS o
WHERE o.kind = %(kind)s AND o.last_failed_at >= %(began)s
LIMIT 1;

-- One row per endpoint (hash of URL and key), shared by all processes: its trouble is met once.

-- name: resting
SELECT e.state, e.reason, extract(EPOCH FROM e.until - clock_timestamp())::float8 AS seconds
FROM embed_assets.embedding_endpoints AS e
WHERE e.endpoint = %(endpoint)s AND e.state <> 'ok' AND e.until > clock_timestamp();

-- name: rest
-- The longer rest wins, so that processes that hit one outage together do not shorten it.
INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, state, until, reason)
VALUES (%(endpoint)s, %(state)s, clock_timestamp() + %(seconds)s * interval '1 second', %(reason)s)
ON CONFLICT (endpoint) DO UPDATE SET
state = excluded.state,
until = greatest(e.until, excluded.until),
reason = excluded.reason,
updated_at = clock_timestamp();

-- name: works
UPDATE embed_assets.embedding_endpoints
SET state = 'ok', until = NULL, reason = NULL, updated_at = clock_timestamp()
WHERE endpoint = %(endpoint)s AND state <> 'ok';

-- name: try_turn
SELECT pg_try_advisory_lock(1701667429, %(turn)s) AS mine;

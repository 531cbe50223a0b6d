-- One row per endpoint (hash of URL and key), shared by all processes: its trouble is met once, its pace kept together,
-- its limits learned once.

-- name: resting
SELECT e.state, e.reason, extract(EPOCH FROM e.until - clock_timestamp())::float8 AS seconds
FROM embed_assets.embedding_endpoints AS e
WHERE e.endpoint = %(endpoint)s AND e.state <> 'ok' AND e.until > clock_timestamp();

-- name: rest
-- The longer rest wins, so that processes that hit one outage together do not shorten it. One that has been warming
-- for longer than any start takes is refused: an operator must look at it. `warming_since` is kept while it is asked
-- every now and then.
WITH asked AS MATERIALIZED (
    SELECT
        %(endpoint)s AS endpoint,
        CASE WHEN %(state)s = 'warming' THEN coalesce(min(e.warming_since), clock_timestamp()) END AS warming_since
    FROM embed_assets.embedding_endpoints AS e
    WHERE e.endpoint = %(endpoint)s AND e.until > clock_timestamp() - interval '10 minutes'
),

judged AS MATERIALIZED (
    SELECT
        a.*,
        coalesce(a.warming_since < clock_timestamp() - %(warming)s * interval '1 second', FALSE) AS too_long
    FROM asked AS a
)

INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, state, until, reason, warming_since)
SELECT
    j.endpoint,
    CASE WHEN j.too_long THEN 'refused' ELSE %(state)s END,
    clock_timestamp()
    + CASE WHEN j.too_long THEN %(refused)s ELSE %(seconds)s END * interval '1 second',
    CASE WHEN j.too_long THEN %(too_long)s ELSE %(reason)s END,
    j.warming_since
FROM judged AS j
ON CONFLICT (endpoint) DO UPDATE SET
state = excluded.state,
until = excluded.until,
reason = excluded.reason,
warming_since = excluded.warming_since,
updated_at = clock_timestamp()
WHERE e.until IS NULL OR e.until < excluded.until;

-- name: works
-- An answer to a request that was sent before another process met trouble does not end the rest.
UPDATE embed_assets.embedding_endpoints
SET state = 'ok', until = NULL, reason = NULL, warming_since = NULL, updated_at = clock_timestamp()
WHERE
    endpoint = %(endpoint)s AND state <> 'ok'
    AND (until <= clock_timestamp() OR updated_at < clock_timestamp() - %(seconds)s * interval '1 second');

-- name: trip
INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, tripped_by, tripped_at)
VALUES (%(endpoint)s, %(code)s, clock_timestamp())
ON CONFLICT (endpoint) DO UPDATE SET
tripped_by = excluded.tripped_by,
tripped_at = excluded.tripped_at
WHERE
    e.tripped_by IS DISTINCT FROM excluded.tripped_by
    OR e.tripped_at < clock_timestamp() - interval '1 hour';

-- name: pace
-- The next place in the row of requests; each takes as long as its share of the minute.
INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, free_at)
VALUES (%(endpoint)s, clock_timestamp() + %(seconds)s * interval '1 second')
ON CONFLICT (endpoint) DO UPDATE SET
free_at = greatest(e.free_at, clock_timestamp()) + %(seconds)s * interval '1 second'
RETURNING
    extract(EPOCH FROM free_at - clock_timestamp())::float8 - %(seconds)s AS wait;

-- name: known_limits
-- Forgotten a day after the last lesson, so that one bad hour does not make requests small for ever.
SELECT e.max_items AS items, e.max_bytes AS bytes, e.max_chars AS chars
FROM embed_assets.embedding_endpoints AS e
WHERE e.endpoint = %(endpoint)s AND e.learned_at > clock_timestamp() - interval '1 day';

-- name: learn
INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, max_items, max_bytes, max_chars, learned_at)
VALUES (%(endpoint)s, %(items)s, %(bytes)s, %(chars)s, clock_timestamp())
ON CONFLICT (endpoint) DO UPDATE SET
max_items = excluded.max_items,
max_bytes = excluded.max_bytes,
max_chars = excluded.max_chars,
learned_at = excluded.learned_at;

-- name: agree
-- The first word counts: what stands there wins over what is said now.
INSERT INTO embed_assets.embedding_endpoints AS e (endpoint, reported)
VALUES (%(endpoint)s, jsonb_build_object(%(model)s::text, %(reported)s::text))
ON CONFLICT (endpoint) DO UPDATE SET
reported = excluded.reported || e.reported
RETURNING reported ->> %(model)s AS reported;

-- name: try_turn
SELECT pg_try_advisory_lock(1701667429, %(turn)s) AS mine;

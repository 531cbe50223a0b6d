-- The queue. Lock order everywhere: kind (advisory) -> wave -> entries by source id -> chunks.
-- clock_timestamp() of the database is the only clock; it stands in a subselect where an index must see it.

-- name: waves_of_run
-- The open waves of this run, as their next stage finds them.
SELECT w.wave_id, w.token, w.kind, w.model_id, w.run_id, w.claimed_at, e.id AS entry_id, e.source_id, e.forced
FROM embed_assets.claimed_waves AS w
INNER JOIN embed_assets.semantic_outbox AS e ON e.wave_id = w.wave_id AND e.status = 'leased'
WHERE w.kind = %(kind)s AND w.run_id = %(run_id)s AND w.closed_at IS NULL
ORDER BY w.wave_id, e.source_id;

-- name: renew
-- A heartbeat touches only the wave's row. A row that is locked (its own write, or a reaper) is skipped, which is
-- no refusal; refused is what is closed, another's or expired, but not what its own write has just closed. At most an
-- hour a wave: a hung process must not hold for ever.
WITH mine AS (
    SELECT m.wave_id, m.token FROM unnest(%(wave_ids)s::bigint [], %(tokens)s::uuid []) AS m (wave_id, token)
),

free AS MATERIALIZED (
    SELECT w.wave_id
    FROM embed_assets.claimed_waves AS w
    INNER JOIN mine ON mine.wave_id = w.wave_id AND mine.token = w.token
    WHERE
        w.closed_at IS NULL AND w.lease_until > clock_timestamp()
        AND w.claimed_at > clock_timestamp() - interval '1 hour'
    ORDER BY w.wave_id
    FOR UPDATE OF w SKIP LOCKED
),

renewed AS (
    UPDATE embed_assets.claimed_waves AS w
    SET lease_until = clock_timestamp() + %(lease)s * interval '1 second'
    FROM free
    WHERE w.wave_id = free.wave_id
    RETURNING w.wave_id
)

SELECT
    mine.wave_id,
    renewed.wave_id IS NOT NULL AS renewed,
    coalesce(
        w.token = mine.token
        AND (w.outcome = 'written' OR (w.closed_at IS NULL AND w.lease_until > clock_timestamp())), FALSE
    ) AS alive
FROM mine
LEFT JOIN embed_assets.claimed_waves AS w ON w.wave_id = mine.wave_id
LEFT JOIN renewed ON renewed.wave_id = mine.wave_id;

-- name: lost
-- Read between heartbeats, so that work ends within a second when a wave was closed or taken from its holder.
SELECT mine.wave_id
FROM unnest(%(wave_ids)s::bigint [], %(tokens)s::uuid []) AS mine (wave_id, token)
LEFT JOIN embed_assets.claimed_waves AS w ON w.wave_id = mine.wave_id
WHERE (
    w.token = mine.token AND (w.outcome = 'written' OR (w.closed_at IS NULL AND w.lease_until > clock_timestamp()))
) IS NOT TRUE;

-- name: start
-- Committed before work on the wave begins: only started waves charge their entries when the lease lapses.
UPDATE embed_assets.claimed_waves
SET started_at = coalesce(started_at, clock_timestamp())
WHERE
    wave_id = %(wave_id)s AND token = %(token)s AND closed_at IS NULL AND lease_until > clock_timestamp()
RETURNING wave_id;

-- name: fence
-- First statement of write and fail: token, open and unexpired, and the row held until commit, so that neither
-- reaper nor another holder can act on the wave meanwhile.
SELECT w.claimed_at FROM embed_assets.claimed_waves AS w
WHERE
    w.wave_id = %(wave_id)s AND w.token = %(token)s
    AND w.closed_at IS NULL AND w.lease_until > clock_timestamp()
FOR UPDATE;

-- name: lock_entries
SELECT e.source_id FROM embed_assets.semantic_outbox AS e
WHERE
    e.kind = %(kind)s AND e.model_id = %(model_id)s AND e.wave_id = %(wave_id)s AND e.status = 'leased'
    AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
ORDER BY e.source_id
FOR UPDATE;

-- name: fail
-- One charge per entry, whatever the answer to a commit: what this wave has charged before is counted and left alone.
-- A change that was folded while the wave ran makes the failure old news: the entry is
-- pending, uncharged. Backoff 5 s doubling, cap 10 min, +-20 percent, the server's own wish as minimum.
-- The revision that failed is the loaded one; where the failure does not know it, the wave's plan does. Without it
-- a dead entry would not come back when its source changes.
WITH given AS MATERIALIZED (
    SELECT %(kind)s::text AS kind, %(model_id)s::integer AS model_id, g.* FROM unnest(
        %(ids)s::text [], %(codes)s::text [], %(classes)s::text [], %(messages)s::text [],
        %(deterministic)s::boolean [], %(revisions)s::text [], %(known)s::boolean [], %(delays)s::float8 []
    ) AS g (source_id, code, class, message, deterministic, revision, known, delay)
),

known AS (
    SELECT o.status FROM embed_assets.semantic_outbox AS o
    INNER JOIN given AS g ON o.kind = g.kind AND o.source_id = g.source_id AND o.model_id = g.model_id
    WHERE o.wave_id = %(wave_id)s AND o.status IN ('retry_wait', 'dead')
),

failed AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        attempts = o.attempts + 1,
        failures = o.failures + 1,
        status = CASE
            WHEN g.deterministic OR o.attempts + 1 >= %(max_attempts)s THEN 'dead'
            ELSE 'retry_wait'
        END,
        deaths = o.deaths + (g.deterministic OR o.attempts + 1 >= %(max_attempts)s)::integer,
        next_attempt_at = clock_timestamp() + interval '1 second' * greatest(
            least(5 * power(2, least(o.attempts, 20)), 600) * (0.8 + 0.4 * random()), g.delay
        ),
        error_code = g.code,
        error_class = g.class,
        error_message = g.message,
        revision = CASE WHEN g.known THEN g.revision ELSE p.revision END,
        revision_known = g.known OR p.source_id IS NOT NULL,
        first_failed_at = coalesce(o.first_failed_at, clock_timestamp()),
        last_failed_at = clock_timestamp()
    FROM given AS g
    LEFT JOIN embed_assets.wave_chunks AS p
        ON p.wave_id = %(wave_id)s AND p.source_id = g.source_id AND p.chunk_index = -1
    WHERE
        o.kind = g.kind AND o.source_id = g.source_id AND o.model_id = g.model_id
        AND o.wave_id = %(wave_id)s AND o.status = 'leased' AND o.requested_at <= %(claimed_at)s
    RETURNING o.*
),

back AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET status = 'pending'
    FROM given AS g
    WHERE
        o.kind = g.kind AND o.source_id = g.source_id AND o.model_id = g.model_id
        AND o.wave_id = %(wave_id)s AND o.status = 'leased' AND o.requested_at > %(claimed_at)s
    RETURNING o.source_id
),

logged AS (
    INSERT INTO embed_assets.semantic_outbox_log
    (
        kind, source_id, model_id, outcome, reason, claims, attempts, enqueued_at, claimed_at, run_id, wave_id,
        error_code, error_class
    )
    SELECT
        f.kind, f.source_id, f.model_id, 'dead', f.reason, f.claims, f.attempts, f.enqueued_at, %(claimed_at)s,
        %(run_id)s, f.wave_id, f.error_code, f.error_class
    FROM failed AS f
    WHERE f.status = 'dead'
    ORDER BY f.source_id
)

SELECT
    count(*) FILTER (WHERE f.status = 'dead') AS dead,
    count(*) FILTER (WHERE f.status = 'retry_wait') AS failed,
    (SELECT count(*) FROM back) AS back,
    (SELECT count(*) FROM known AS k WHERE k.status = 'dead') AS known_dead,
    (SELECT count(*) FROM known AS k WHERE k.status = 'retry_wait') AS known_failed
FROM failed AS f;

-- name: count_failures
UPDATE embed_assets.claimed_waves
SET failed = failed + %(failed)s, dead = dead + %(dead)s
WHERE wave_id = %(wave_id)s;

-- name: release_entries
-- Nothing is charged. A wave that timed out with nothing staged marks its entries; a suspect that times out
-- alone dies, in a class that the reconciler may retry.
WITH mine AS (
    SELECT w.claimed, w.claimed_at, w.run_id, %(timed_out)s AND w.texts = 0 AS timed_out
    FROM embed_assets.claimed_waves AS w
    WHERE w.wave_id = %(wave_id)s
),

released AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        timeouts = o.timeouts + mine.timed_out::integer,
        status = CASE WHEN mine.timed_out AND mine.claimed = 1 AND o.timeouts >= 2 THEN 'dead' ELSE 'pending' END,
        deaths = o.deaths + (mine.timed_out AND mine.claimed = 1 AND o.timeouts >= 2)::integer,
        error_code = CASE WHEN mine.timed_out THEN 'timeout' ELSE o.error_code END,
        error_class = CASE WHEN mine.timed_out THEN 'timeout' ELSE o.error_class END,
        error_message = CASE WHEN mine.timed_out THEN 'its wave used up its time with nothing staged'
        ELSE o.error_message END,
        failures = o.failures + mine.timed_out::integer,
        first_failed_at = CASE WHEN mine.timed_out THEN coalesce(o.first_failed_at, clock_timestamp())
        ELSE o.first_failed_at END,
        last_failed_at = CASE WHEN mine.timed_out THEN clock_timestamp() ELSE o.last_failed_at END
    FROM mine
    WHERE o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.wave_id = %(wave_id)s AND o.status = 'leased'
    RETURNING o.*, mine.claimed_at, mine.run_id
),

logged AS (
    INSERT INTO embed_assets.semantic_outbox_log
    (
        kind, source_id, model_id, outcome, reason, claims, attempts, enqueued_at, claimed_at, run_id, wave_id,
        error_code, error_class
    )
    SELECT
        r.kind, r.source_id, r.model_id, 'dead', r.reason, r.claims, r.attempts, r.enqueued_at, r.claimed_at,
        r.run_id, r.wave_id, r.error_code, r.error_class
    FROM released AS r
    WHERE r.status = 'dead'
    ORDER BY r.source_id
)

SELECT count(*) AS released, count(*) FILTER (WHERE r.status = 'dead') AS dead FROM released AS r;

-- name: hold_wave
-- Release needs the token and an open wave; that its lease has run out harms nobody.
SELECT w.wave_id FROM embed_assets.claimed_waves AS w
WHERE w.wave_id = %(wave_id)s AND w.token = %(token)s AND w.closed_at IS NULL
FOR UPDATE;

-- name: count_progress
-- What was had without buying, then request by request what was bought (chunks.count_kept). Dropped without a word
-- where the lease is lost: whoever has the entries now counts for himself.
UPDATE embed_assets.claimed_waves
SET reused = %(reused)s
WHERE
    wave_id = %(wave_id)s AND token = %(token)s AND closed_at IS NULL AND lease_until > clock_timestamp();

-- name: count_staged
-- What staging cost, kept with the wave: the write may happen in another process.
UPDATE embed_assets.claimed_waves
SET
    texts = %(texts)s,
    sent = %(sent)s,
    tokens = %(tokens)s,
    reused = %(reused)s,
    stage_seconds = %(seconds)s
WHERE wave_id = %(wave_id)s AND token = %(token)s AND closed_at IS NULL;

-- name: count_written
UPDATE embed_assets.claimed_waves
SET
    indexed = indexed + %(indexed)s,
    removed = removed + %(removed)s,
    gone = gone + %(gone)s,
    superseded = superseded + %(superseded)s,
    write_seconds = coalesce(write_seconds, 0) + %(seconds)s
WHERE wave_id = %(wave_id)s;

-- name: give_back
-- A wave that was written in parts leaves nothing behind when it is closed: heal looks at expired waves alone.
WITH held AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id FROM embed_assets.semantic_outbox AS e
    WHERE e.kind = %(kind)s AND e.model_id = %(model_id)s AND e.wave_id = %(wave_id)s AND e.status = 'leased'
    ORDER BY e.source_id
    FOR UPDATE
)
UPDATE embed_assets.semantic_outbox AS o SET status = 'pending'
FROM held
WHERE o.kind = held.kind AND o.source_id = held.source_id AND o.model_id = held.model_id;

-- name: close_wave
-- What is not accounted for went back to pending: lost to this wave, to nobody else.
UPDATE embed_assets.claimed_waves
SET
    closed_at = clock_timestamp(),
    outcome = %(outcome)s,
    dead = dead + %(dead)s,
    lost = claimed - (indexed + removed + gone + superseded + failed + dead + %(dead)s)
WHERE wave_id = %(wave_id)s;

-- name: wave_counts
SELECT w.indexed, w.removed, w.gone, w.superseded, w.failed, w.dead, w.outcome
FROM embed_assets.claimed_waves AS w
WHERE w.wave_id = %(wave_id)s AND w.token = %(token)s;

-- name: drop_plans
-- A wave's plan is emptied when the wave closes.
DELETE FROM embed_assets.wave_chunks WHERE wave_id = ANY(%(wave_ids)s);

-- name: open_waves_of_runs
SELECT w.wave_id, w.token, w.kind, w.model_id, w.run_id, w.claimed_at
FROM embed_assets.claimed_waves AS w
WHERE w.kind = %(kind)s AND w.run_id = ANY(%(runs)s) AND w.closed_at IS NULL
ORDER BY w.wave_id;

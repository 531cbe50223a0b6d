-- The queue. Lock order everywhere: kind (advisory) -> wave -> entries by source id -> chunks.
-- clock_timestamp() of the database is the only clock; it stands in a subselect where an index must see it.

-- name: acquire_enqueue_lease
-- One enqueuer per kind. A held row (a batch of another enqueuer commits) is a lease that is held.
WITH free AS (
    SELECT s.kind FROM embed_assets.corpus_scans AS s
    WHERE s.kind = %(kind)s AND (s.until IS NULL OR s.until <= clock_timestamp())
    FOR UPDATE SKIP LOCKED
)
UPDATE embed_assets.corpus_scans AS s
SET token = gen_random_uuid(), until = clock_timestamp() + %(lease)s * INTERVAL '1 second'
FROM free
WHERE s.kind = free.kind
RETURNING
    s.token,
    s.last_scan_at IS NULL
    OR s.last_scan_at <= clock_timestamp() - 20 * coalesce(s.seconds, 0) * INTERVAL '1 second' AS scan_due,
    s.last_reconcile_at IS NULL
    OR s.last_reconcile_at <= clock_timestamp() - %(reconcile_seconds)s * INTERVAL '1 second' AS reconcile_due;

-- name: hold_enqueue_lease
-- First statement of each batch: fences an enqueuer that was taken over, and renews.
UPDATE embed_assets.corpus_scans
SET until = clock_timestamp() + %(lease)s * INTERVAL '1 second'
WHERE kind = %(kind)s AND token = %(token)s AND until > clock_timestamp()
RETURNING token;

-- name: release_enqueue_lease
UPDATE embed_assets.corpus_scans
SET
    token = NULL,
    until = NULL,
    last_scan_at = CASE WHEN %(scanned)s THEN clock_timestamp() ELSE last_scan_at END,
    seconds = CASE WHEN %(scanned)s THEN %(seconds)s ELSE seconds END,
    last_reconcile_at = CASE WHEN %(reconciled)s THEN clock_timestamp() ELSE last_reconcile_at END
WHERE kind = %(kind)s AND token = %(token)s;

-- name: fold
-- Feed rows become entries. requested_at is this statement's clock, read after the entry's lock is had: a
-- producer's own reading would lose requests that are committed late. The order of the inserts is the lock order.
WITH taken AS (
    DELETE FROM embed_assets.source_changes
    WHERE ctid = ANY(ARRAY(
        SELECT c.ctid FROM embed_assets.source_changes AS c
        WHERE c.kind = %(kind)s
        ORDER BY c.id
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING source_id AS given, reason, forced, lane, scope
),

merged AS (
    SELECT
        t.source_id,
        (array_agg(t.reason ORDER BY t.lane, t.reason))[1] AS reason,
        bool_or(t.forced) AS forced,
        min(t.lane) AS lane,
        max(t.scope) AS scope
    FROM (SELECT {canonical} AS source_id, taken.* FROM taken) AS t
    WHERE t.source_id IS NOT NULL
    GROUP BY t.source_id
),

upserted AS (
    INSERT INTO embed_assets.semantic_outbox AS o
    (kind, source_id, model_id, scope, reason, lane, rank, forced)
    SELECT
        %(kind)s, e.source_id, m.model_id, e.scope, e.reason, e.lane, coalesce(source.rank, 'Infinity'), e.forced
    FROM merged AS e
    CROSS JOIN unnest(%(models)s::integer []) AS m (model_id)
    LEFT JOIN {source} AS source ON source.key = {e_key}
    ORDER BY e.source_id, m.model_id
    ON CONFLICT (kind, source_id, model_id) DO UPDATE SET
    requested_at = clock_timestamp(),
    forced = o.forced OR excluded.forced,
    lane = least(o.lane, excluded.lane),
    rank = excluded.rank,
    reason = excluded.reason,
    attempts = 0,
    crashes = 0,
    timeouts = 0,
    next_attempt_at = NULL,
    dismissed_at = NULL,
    status = CASE o.status WHEN 'leased' THEN 'leased' ELSE 'pending' END
    RETURNING (o.xmax = 0) AS created
)

SELECT
    (SELECT count(*) FROM taken) AS folded,
    (SELECT count(*) FROM upserted WHERE upserted.created) AS created,
    (SELECT count(*) FROM taken WHERE ({canonical}) IS NULL) AS unknown;

-- name: scan_bound
-- The key that ends the next range; no row when fewer keys than a range are left.
SELECT source.key AS bound FROM {source} AS source
WHERE source.key > %(after)s OR %(after)s IS NULL
ORDER BY source.key
OFFSET %(size)s - 1
LIMIT 1;

-- name: scan_range
-- Indexable rows whose stamp is missing or says another revision. The anti-join on entries, not a merging
-- upsert: a scan must neither rewrite the backlog nor wait for writers.
INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, scope, reason, lane, rank)
SELECT %(kind)s, source.source_id, m.model_id, NULL, %(reason)s, 0, source.rank
FROM {source} AS source
CROSS JOIN unnest(%(models)s::integer []) AS m (model_id)
LEFT JOIN embed_assets.semantic_stamps AS s
    ON s.kind = %(kind)s AND s.model_id = m.model_id AND s.source_id = source.source_id
WHERE
    (source.key > %(after)s OR %(after)s IS NULL)
    AND (source.key <= %(upto)s OR %(upto)s IS NULL)
    AND source.indexable
    AND (s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision)
    AND NOT EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE o.kind = %(kind)s AND o.source_id = source.source_id AND o.model_id = m.model_id
    )
ORDER BY source.source_id, m.model_id
ON CONFLICT (kind, source_id, model_id) DO NOTHING;

-- name: clear_bound
-- The stamp that ends the next page of stamps.
SELECT s.source_id AS bound FROM embed_assets.semantic_stamps AS s
WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id > %(after)s
ORDER BY s.source_id
OFFSET %(size)s - 1
LIMIT 1;

-- name: clear_count
-- How many of a page's stamps have lost their row, or its place in search: counted before anything is cleared.
SELECT count(*) AS stamps, count(*) FILTER (WHERE source.indexable IS NOT TRUE) AS to_clear
FROM embed_assets.semantic_stamps AS s
LEFT JOIN {source} AS source ON source.key = {s_key}
WHERE
    s.kind = %(kind)s AND s.model_id = %(model_id)s
    AND s.source_id > %(after)s AND (s.source_id <= %(upto)s OR %(upto)s IS NULL);

-- name: clear_range
-- Stamped rows that are gone or not indexable are enqueued, so that a wave clears them.
INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, lane, rank)
SELECT %(kind)s, s.source_id, s.model_id, %(reason)s, 0, coalesce(source.rank, 'Infinity')
FROM embed_assets.semantic_stamps AS s
LEFT JOIN {source} AS source ON source.key = {s_key}
WHERE
    s.kind = %(kind)s AND s.model_id = %(model_id)s
    AND s.source_id > %(after)s AND (s.source_id <= %(upto)s OR %(upto)s IS NULL)
    AND source.indexable IS NOT TRUE
    AND NOT EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE o.kind = %(kind)s AND o.source_id = s.source_id AND o.model_id = s.model_id
    )
ORDER BY s.source_id, s.model_id
ON CONFLICT (kind, source_id, model_id) DO NOTHING;

-- name: unstamp_short
-- Facts, not bookkeeping: a stamp whose chunks are not all there (pruned, restored) is deleted, so that the scan
-- finds the row; kept, staging would call it superseded.
WITH counted AS MATERIALIZED (
    SELECT
        s.source_id,
        s.chunk_count,
        (
            SELECT count(*) FROM {chunks} AS c WHERE c.{key} = {s_key} AND c.model_id = {model_id}
        ) AS present
    FROM embed_assets.semantic_stamps AS s
    WHERE
        s.kind = %(kind)s AND s.model_id = {model_id}
        AND s.source_id > %(after)s AND (s.source_id <= %(upto)s OR %(upto)s IS NULL)
)
DELETE FROM embed_assets.semantic_stamps AS s
USING counted AS c
WHERE
    s.kind = %(kind)s AND s.model_id = {model_id} AND s.source_id = c.source_id
    AND s.chunk_count = c.chunk_count AND c.present <> c.chunk_count;

-- name: stale_exists
-- The scan's own predicate, first hit only: what the sensor asks when nobody says what changed.
SELECT
    EXISTS (
        SELECT FROM {source} AS source
        LEFT JOIN embed_assets.semantic_stamps AS s
            ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
        WHERE
            source.indexable
            AND (s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision)
            AND NOT EXISTS (
                SELECT FROM embed_assets.semantic_outbox AS o
                WHERE o.kind = %(kind)s AND o.source_id = source.source_id AND o.model_id = %(model_id)s
            )
    )
    OR EXISTS (
        SELECT FROM embed_assets.semantic_stamps AS s
        LEFT JOIN {source} AS source ON source.key = {s_key}
        WHERE
            s.kind = %(kind)s AND s.model_id = %(model_id)s AND source.indexable IS NOT TRUE
            AND NOT EXISTS (
                SELECT FROM embed_assets.semantic_outbox AS o
                WHERE o.kind = %(kind)s AND o.source_id = s.source_id AND o.model_id = s.model_id
            )
    )
    OR EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS e
        LEFT JOIN {source} AS source ON source.key = {e_key}
        WHERE
            e.kind = %(kind)s AND e.model_id = %(model_id)s AND e.status = 'dead'
            AND (
                source.indexable IS NOT TRUE
                OR (e.revision_known AND e.revision IS DISTINCT FROM source.revision)
            )
    ) AS stale;

-- name: revive_changed
-- Dead entries whose source changed come back; those whose source is gone come back to be cleared and settled.
WITH changed AS (
    SELECT e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    LEFT JOIN {source} AS source ON source.key = {e_key}
    WHERE
        e.kind = %(kind)s AND e.model_id = ANY(%(models)s) AND e.status = 'dead'
        AND (
            source.indexable IS NOT TRUE
            OR (e.revision_known AND e.revision IS DISTINCT FROM source.revision)
        )
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
    next_attempt_at = NULL,
    dismissed_at = NULL,
    requested_at = clock_timestamp()
FROM changed
WHERE o.kind = %(kind)s AND o.source_id = changed.source_id AND o.model_id = changed.model_id;

-- name: reap
-- Close the waves whose lease ran out. A wave that is being written holds its row: it is skipped.
WITH expired AS MATERIALIZED (
    SELECT w.wave_id FROM embed_assets.claimed_waves AS w
    WHERE w.kind = %(kind)s AND w.closed_at IS NULL AND w.lease_until <= (SELECT clock_timestamp())
    ORDER BY w.wave_id
    FOR UPDATE SKIP LOCKED
)
UPDATE embed_assets.claimed_waves AS w
SET closed_at = clock_timestamp(), outcome = 'expired', lost = w.claimed
FROM expired
WHERE w.wave_id = expired.wave_id
RETURNING w.wave_id;

-- name: heal
-- No leased entry may point at a closed wave. The lost lease of a started wave is a crash of its entries
-- (one that had not begun harmed nobody); the third kills.
WITH orphans AS MATERIALIZED (
    SELECT
        e.source_id,
        e.model_id,
        w.run_id,
        w.claimed_at,
        (w.outcome = 'expired' AND w.started_at IS NOT NULL)::integer AS crash
    FROM embed_assets.semantic_outbox AS e
    INNER JOIN embed_assets.claimed_waves AS w ON w.wave_id = e.wave_id
    WHERE e.kind = %(kind)s AND e.status = 'leased' AND w.closed_at IS NOT NULL
    ORDER BY e.source_id, e.model_id
    FOR UPDATE OF e SKIP LOCKED
),

healed AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        crashes = o.crashes + r.crash,
        status = CASE WHEN o.crashes + r.crash >= %(max_crashes)s THEN 'dead' ELSE 'pending' END,
        failures = o.failures + r.crash,
        first_failed_at = CASE WHEN r.crash = 1 THEN coalesce(o.first_failed_at, clock_timestamp())
        ELSE o.first_failed_at END,
        last_failed_at = CASE WHEN r.crash = 1 THEN clock_timestamp() ELSE o.last_failed_at END,
        error_code = CASE WHEN r.crash = 1 THEN 'LEASE_ATTEMPTS_EXHAUSTED' ELSE o.error_code END,
        error_class = CASE WHEN r.crash = 1 THEN 'LEASE_ATTEMPTS_EXHAUSTED' ELSE o.error_class END,
        error_message = CASE WHEN r.crash = 1 THEN 'the process that worked on it did not come back'
        ELSE o.error_message END
    FROM orphans AS r
    WHERE o.kind = %(kind)s AND o.source_id = r.source_id AND o.model_id = r.model_id
    RETURNING o.*, r.run_id, r.claimed_at
)

INSERT INTO embed_assets.semantic_outbox_log
(
    kind, source_id, model_id, outcome, reason, attempts, enqueued_at, claimed_at, run_id, wave_id,
    error_code, error_class
)
SELECT
    h.kind, h.source_id, h.model_id, 'dead', h.reason, h.attempts, h.enqueued_at, h.claimed_at, h.run_id, h.wave_id,
    h.error_code, h.error_class
FROM healed AS h
WHERE h.status = 'dead'
ORDER BY h.source_id;

-- name: claim
-- Due retries (at most a quarter) and pending entries become a wave in one statement. SKIP LOCKED: two claims
-- never wait for each other and never share a row. An empty claim makes no wave.
WITH retries AS MATERIALIZED (
    SELECT o.source_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'retry_wait'
        AND o.next_attempt_at <= (SELECT clock_timestamp())
        AND o.crashes < 2 AND o.timeouts < 2
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
    ORDER BY o.next_attempt_at
    LIMIT greatest(1, %(limit)s / 4)
    FOR UPDATE SKIP LOCKED
),

pending AS MATERIALIZED (
    SELECT o.source_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND o.crashes < 2 AND o.timeouts < 2
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
    ORDER BY {order}
    LIMIT greatest(0, %(limit)s - (SELECT count(*) FROM retries))
    FOR UPDATE SKIP LOCKED
),

{lease};

-- name: claim_suspect
-- An entry whose wave crashed or timed out twice goes alone, and only when nothing else is due.
WITH retries AS MATERIALIZED (
    SELECT o.source_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'retry_wait'
        AND o.next_attempt_at <= (SELECT clock_timestamp())
        AND (o.crashes >= 2 OR o.timeouts >= 2)
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
    ORDER BY o.next_attempt_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
),

pending AS MATERIALIZED (
    SELECT o.source_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND (o.crashes >= 2 OR o.timeouts >= 2)
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
    ORDER BY o.lane, o.rank, o.id
    LIMIT 1 - (SELECT count(*) FROM retries)
    FOR UPDATE SKIP LOCKED
),

{lease};

-- name: claim_of_runs
-- What the closed waves of a re-executed run left: as new waves with new tokens. If another drain took the
-- entries meanwhile, this is empty.
WITH retries AS MATERIALIZED (
    SELECT NULL::text AS source_id WHERE FALSE
),

pending AS MATERIALIZED (
    SELECT o.source_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND o.crashes < 2 AND o.timeouts < 2
        AND o.wave_id IN (
            SELECT w.wave_id FROM embed_assets.claimed_waves AS w WHERE w.run_id = ANY(%(ancestors)s)
        )
    ORDER BY o.lane, o.rank, o.id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),

{lease};

-- name: lease
-- The second half of every claim: the wave, and its entries pointed at it.
taken AS (
    SELECT source_id FROM retries
    UNION ALL
    SELECT source_id FROM pending
),

wave AS (
    INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until, claimed)
    SELECT %(kind)s, %(model_id)s, %(run_id)s, clock_timestamp() + %(lease)s * INTERVAL '1 second', count(*)
    FROM taken
    HAVING count(*) > 0
    RETURNING wave_id, token, kind, model_id, run_id, claimed_at
),

leased AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET status = 'leased', wave_id = wave.wave_id
    FROM taken, wave
    WHERE o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = taken.source_id
    RETURNING o.id, o.source_id, o.forced
)

SELECT wave.*, leased.id AS entry_id, leased.source_id, leased.forced
FROM wave CROSS JOIN leased
ORDER BY leased.source_id;

-- name: waves_of_run
-- The open waves of this run, as their next stage finds them.
SELECT w.wave_id, w.token, w.kind, w.model_id, w.run_id, w.claimed_at, e.id AS entry_id, e.source_id, e.forced
FROM embed_assets.claimed_waves AS w
INNER JOIN embed_assets.semantic_outbox AS e ON e.wave_id = w.wave_id AND e.status = 'leased'
WHERE w.kind = %(kind)s AND w.run_id = %(run_id)s AND w.closed_at IS NULL
ORDER BY w.wave_id, e.source_id;

-- name: claimable
-- "Empty" is believed only when this says so: a claim may have skipped rows that somebody had locked.
SELECT EXISTS (
    SELECT FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = ANY(%(models)s) AND o.status = 'pending'
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
) OR EXISTS (
    SELECT FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = ANY(%(models)s) AND o.status = 'retry_wait'
        AND o.next_attempt_at <= (SELECT clock_timestamp())
        AND (o.last_failed_at < %(failed_before)s) IS NOT FALSE
) AS claimable;

-- name: clock
SELECT clock_timestamp() AS now;

-- name: recent_rate
-- Rows per second of the last written waves: what a run of about a minute is sized by.
SELECT sum(recent.claimed) / nullif(sum(recent.seconds), 0) AS rows_per_second
FROM (
    SELECT w.claimed, coalesce(w.stage_seconds, 0) + coalesce(w.write_seconds, 0) AS seconds
    FROM embed_assets.claimed_waves AS w
    WHERE w.kind = %(kind)s AND w.outcome = 'written' AND w.texts > 0
    ORDER BY w.wave_id DESC
    LIMIT 20
) AS recent;

-- name: next_wave_number
SELECT coalesce(max(w.wave_id), 0) + 1 AS number FROM embed_assets.claimed_waves AS w;

-- name: renew
-- A heartbeat touches only the wave's row. A row that is locked (its own write, or a reaper) is skipped, which is
-- no refusal; refused is what is closed, another's or expired. At most an hour a wave: a hung process must not
-- hold for ever.
WITH mine AS (
    SELECT m.wave_id, m.token FROM unnest(%(wave_ids)s::bigint [], %(tokens)s::uuid []) AS m (wave_id, token)
),

free AS MATERIALIZED (
    SELECT w.wave_id
    FROM embed_assets.claimed_waves AS w
    INNER JOIN mine ON mine.wave_id = w.wave_id AND mine.token = w.token
    WHERE
        w.closed_at IS NULL AND w.lease_until > clock_timestamp()
        AND w.claimed_at > clock_timestamp() - INTERVAL '1 hour'
    ORDER BY w.wave_id
    FOR UPDATE OF w SKIP LOCKED
),

renewed AS (
    UPDATE embed_assets.claimed_waves AS w
    SET lease_until = clock_timestamp() + %(lease)s * INTERVAL '1 second'
    FROM free
    WHERE w.wave_id = free.wave_id
    RETURNING w.wave_id
)

SELECT
    mine.wave_id,
    renewed.wave_id IS NOT NULL AS renewed,
    coalesce(w.token = mine.token AND w.closed_at IS NULL AND w.lease_until > clock_timestamp(), FALSE) AS alive
FROM mine
LEFT JOIN embed_assets.claimed_waves AS w ON w.wave_id = mine.wave_id
LEFT JOIN renewed ON renewed.wave_id = mine.wave_id;

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
-- One charge per entry. A change that was folded while the wave ran makes the failure old news: the entry is
-- pending, uncharged. Backoff 5 s doubling, cap 10 min, +-20 percent, the server's own wish as minimum.
WITH given AS (
    SELECT g.* FROM unnest(
        %(ids)s::text [], %(codes)s::text [], %(classes)s::text [], %(messages)s::text [],
        %(deterministic)s::boolean [], %(revisions)s::text [], %(known)s::boolean [], %(delays)s::float8 []
    ) AS g (source_id, code, class, message, deterministic, revision, known, delay)
),

failed AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        attempts = o.attempts + 1,
        failures = o.failures + 1,
        status = CASE
            WHEN o.requested_at > %(claimed_at)s THEN 'pending'
            WHEN g.deterministic OR o.attempts + 1 >= %(max_attempts)s THEN 'dead'
            ELSE 'retry_wait'
        END,
        next_attempt_at = clock_timestamp() + INTERVAL '1 second' * greatest(
            least(5 * power(2, least(o.attempts, 20)), 600) * (0.8 + 0.4 * random()), g.delay
        ),
        error_code = g.code,
        error_class = g.class,
        error_message = g.message,
        revision = g.revision,
        revision_known = g.known,
        first_failed_at = coalesce(o.first_failed_at, clock_timestamp()),
        last_failed_at = clock_timestamp()
    FROM given AS g
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = g.source_id
        AND o.wave_id = %(wave_id)s AND o.status = 'leased'
    RETURNING o.*
),

logged AS (
    INSERT INTO embed_assets.semantic_outbox_log
    (
        kind, source_id, model_id, outcome, reason, attempts, enqueued_at, claimed_at, run_id, wave_id,
        error_code, error_class
    )
    SELECT
        f.kind, f.source_id, f.model_id, 'dead', f.reason, f.attempts, f.enqueued_at, %(claimed_at)s, %(run_id)s,
        f.wave_id, f.error_code, f.error_class
    FROM failed AS f
    WHERE f.status = 'dead'
    ORDER BY f.source_id
)

SELECT
    count(*) FILTER (WHERE f.status = 'dead') AS dead,
    count(*) FILTER (WHERE f.status = 'retry_wait') AS failed,
    count(*) FILTER (WHERE f.status = 'pending') AS back
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
        kind, source_id, model_id, outcome, reason, attempts, enqueued_at, claimed_at, run_id, wave_id,
        error_code, error_class
    )
    SELECT
        r.kind, r.source_id, r.model_id, 'dead', r.reason, r.attempts, r.enqueued_at, r.claimed_at, r.run_id,
        r.wave_id, r.error_code, r.error_class
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

-- name: count_staged
-- What staging cost, kept with the wave: the write may happen in another process.
UPDATE embed_assets.claimed_waves
SET texts = %(texts)s, tokens = %(tokens)s, reused = %(reused)s, stage_seconds = %(seconds)s
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

-- name: backlog
-- Bounded counts, by index: what asks for a drain, for sensors and loops. It changes nothing.
SELECT
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox
            WHERE kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'pending'
            LIMIT %(limit)s
        ) AS bounded
    ) + (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox
            WHERE
                kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'retry_wait'
                AND next_attempt_at <= (SELECT clock_timestamp())
            LIMIT %(limit)s
        ) AS bounded
    ) AS due,
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.source_changes WHERE kind = %(kind)s LIMIT %(limit)s
        ) AS bounded
    ) AS feed,
    (
        SELECT count(*) FROM embed_assets.claimed_waves
        WHERE kind = %(kind)s AND closed_at IS NULL AND lease_until <= (SELECT clock_timestamp())
    ) AS expired,
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox WHERE kind = %(kind)s AND status = 'leased' LIMIT %(limit)s
        ) AS bounded
    ) AS leased,
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox
            WHERE kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'dead' AND dismissed_at IS NULL
            LIMIT %(limit)s
        ) AS bounded
    ) AS dead,
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox
            WHERE
                kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'retry_wait'
                AND next_attempt_at > (SELECT clock_timestamp())
            LIMIT %(limit)s
        ) AS bounded
    ) AS waiting,
    (
        SELECT extract(EPOCH FROM min(next_attempt_at) - clock_timestamp())::float8
        FROM embed_assets.semantic_outbox
        WHERE kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'retry_wait'
    ) AS next_due_seconds,
    (SELECT paused_at IS NOT NULL FROM embed_assets.corpora WHERE kind = %(kind)s) AS paused;

-- name: status
-- Every source row and every leftover stamp once; the first that applies.
SELECT counted.state, count(*) AS rows
FROM (
    SELECT
        CASE
            WHEN o.status = 'dead' AND o.dismissed_at IS NULL THEN 'dead'
            WHEN o.status = 'leased' THEN 'leased'
            WHEN o.status = 'retry_wait' THEN 'waiting'
            WHEN o.status = 'pending' OR feed.source_id IS NOT NULL THEN 'due'
            WHEN o.status IS NULL AND source.indexable
                AND (s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision) THEN 'due'
            WHEN o.status IS NULL AND source.indexable IS NOT TRUE AND s.source_id IS NOT NULL THEN 'due'
            WHEN source.indexable AND s.source_id IS NOT NULL
                AND s.revision IS NOT DISTINCT FROM source.revision THEN 'fresh'
            WHEN o.dismissed_at IS NOT NULL THEN 'dismissed'
            ELSE 'excluded'
        END AS state
    FROM {source} AS source
    FULL JOIN (
        SELECT stamped.source_id, stamped.revision FROM embed_assets.semantic_stamps AS stamped
        WHERE stamped.kind = %(kind)s AND stamped.model_id = %(model_id)s
    ) AS s ON s.source_id = source.source_id
    LEFT JOIN embed_assets.semantic_outbox AS o
        ON o.kind = %(kind)s AND o.model_id = %(model_id)s
        AND o.source_id = coalesce(source.source_id, s.source_id)
    LEFT JOIN (
        SELECT DISTINCT changed.source_id FROM embed_assets.source_changes AS changed WHERE changed.kind = %(kind)s
    ) AS feed ON feed.source_id = coalesce(source.source_id, s.source_id)
) AS counted
GROUP BY counted.state;

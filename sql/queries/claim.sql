-- Claims: who gets what, and what the waves of the lost give back. One transaction: reap, heal, then a claim.
-- The lock order and the clock are those of outbox.sql.

-- name: reap
-- Close the waves whose lease ran out. A wave that is being written holds its row: it is skipped.
WITH expired AS MATERIALIZED (
    SELECT w.wave_id FROM embed_assets.claimed_waves AS w
    WHERE w.kind = %(kind)s AND w.closed_at IS NULL AND w.lease_until <= (SELECT clock_timestamp()) {of_scope}
    ORDER BY w.wave_id
    FOR UPDATE SKIP LOCKED
)
UPDATE embed_assets.claimed_waves AS w
SET
    closed_at = clock_timestamp(),
    outcome = 'expired',
    lost = w.claimed - (w.indexed + w.removed + w.gone + w.superseded + w.failed + w.dead)
FROM expired
WHERE w.wave_id = expired.wave_id
RETURNING w.wave_id;

-- name: reap_of_scope
AND EXISTS (
    SELECT FROM embed_assets.semantic_outbox AS o
    WHERE o.wave_id = w.wave_id AND o.status = 'leased' AND o.scope = %(scope)s
)

-- name: heal
-- No leased entry may point at a closed wave. The lost lease of a started wave is a crash of its entries
-- (one that had not begun harmed nobody); the third kills. It failed when its lease ran out, not now that this is
-- found: a drain that begins later takes it at once.
-- Only expired waves leave entries behind (whoever writes or releases takes all of them along), and each is looked at
-- until none is left: never the entries that are leased, whose finished versions nobody can clean away under a held
-- snapshot. The wave's numbers stand as an array, so that they are looked up whatever the planner believes.
WITH orphans AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id, o.wave_id
    FROM embed_assets.semantic_outbox AS o
    WHERE
        o.status = 'leased' {of_scope}
        AND o.wave_id = ANY(ARRAY(
            SELECT w.wave_id FROM embed_assets.claimed_waves AS w
            WHERE w.kind = %(kind)s AND w.outcome = 'expired' AND w.healed_at IS NULL
        ))
    ORDER BY o.source_id, o.model_id
    FOR UPDATE OF o SKIP LOCKED
),

healed AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        crashes = o.crashes + r.crash,
        status = CASE WHEN o.crashes + r.crash >= %(max_crashes)s THEN 'dead' ELSE 'pending' END,
        failures = o.failures + r.crash,
        first_failed_at = CASE WHEN r.crash = 1 THEN coalesce(o.first_failed_at, r.lease_until)
        ELSE o.first_failed_at END,
        last_failed_at = CASE WHEN r.crash = 1 THEN r.lease_until ELSE o.last_failed_at END,
        error_code = CASE WHEN r.crash = 1 THEN 'LEASE_ATTEMPTS_EXHAUSTED' ELSE o.error_code END,
        error_class = CASE WHEN r.crash = 1 THEN 'LEASE_ATTEMPTS_EXHAUSTED' ELSE o.error_class END,
        error_message = CASE WHEN r.crash = 1 THEN 'the process that worked on it did not come back'
        ELSE o.error_message END
    FROM (
        SELECT
            e.*, w.run_id, w.claimed_at, w.lease_until, (w.started_at IS NOT NULL)::integer AS crash
        FROM orphans AS e INNER JOIN embed_assets.claimed_waves AS w ON w.wave_id = e.wave_id
    ) AS r
    WHERE o.kind = r.kind AND o.source_id = r.source_id AND o.model_id = r.model_id
    RETURNING o.*, r.run_id, r.claimed_at
),

whole AS MATERIALIZED (
    SELECT w.wave_id FROM embed_assets.claimed_waves AS w
    WHERE
        w.kind = %(kind)s AND w.outcome = 'expired' AND w.healed_at IS NULL
        AND NOT EXISTS (
            SELECT FROM embed_assets.semantic_outbox AS e WHERE e.wave_id = w.wave_id AND e.status = 'leased'
        )
    ORDER BY w.wave_id
    FOR UPDATE OF w SKIP LOCKED
),

marked AS (
    UPDATE embed_assets.claimed_waves AS w SET healed_at = clock_timestamp()
    FROM whole WHERE w.wave_id = whole.wave_id
)

INSERT INTO embed_assets.semantic_outbox_log
(
    kind, source_id, model_id, outcome, reason, claims, attempts, enqueued_at, claimed_at, run_id, wave_id,
    error_code, error_class
)
SELECT
    h.kind, h.source_id, h.model_id, 'dead', h.reason, h.claims, h.attempts, h.enqueued_at, h.claimed_at, h.run_id,
    h.wave_id, h.error_code, h.error_class
FROM healed AS h
WHERE h.status = 'dead'
ORDER BY h.source_id;

-- name: by_index
-- For the claims of this transaction: the order comes from an index at any size. Without statistics the planner
-- would take the whole backlog for one row, and sort it.
SELECT
    set_config('enable_sort', 'off', TRUE),
    set_config('enable_bitmapscan', 'off', TRUE),
    set_config('enable_seqscan', 'off', TRUE);

-- name: due
-- Due retries (at most a quarter) and pending entries become a wave in one statement. SKIP LOCKED: two claims
-- never wait for each other and never share a row. An empty claim makes no wave.
-- The limit of the ordered part is a plain number and its conditions are ones that the planner can count: else it
-- sorts the whole backlog. What it locks beyond the wave's rows is free again at commit.
-- A scope that would fill more than half of the wave is crowding: others that wait get equal shares of a half, and it
-- gets more than a half only if that leaves nothing of theirs. They are found by hopping from scope to scope in the
-- index, at most 50 of them; without a crowd, or of a kind without scopes, that is one look at most.
WITH RECURSIVE retries AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id, o.scope FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'retry_wait'
        AND o.next_attempt_at <= (SELECT clock_timestamp())
        AND o.crashes < 2 AND o.timeouts < 2
        AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    ORDER BY o.next_attempt_at
    LIMIT greatest(1, %(limit)s / 4)
    FOR UPDATE SKIP LOCKED
),

ordered AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id, o.scope FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND o.crashes < 2 AND o.timeouts < 2
        AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    ORDER BY {order}
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),

first AS MATERIALIZED (
    SELECT c.*, row_number() OVER () AS place
    FROM (SELECT * FROM retries UNION ALL SELECT * FROM ordered) AS c
    LIMIT %(limit)s
),

crowd AS MATERIALIZED (
    SELECT f.scope FROM first AS f
    WHERE %(scope)s::text IS NULL
    GROUP BY f.scope
    HAVING count(*) > greatest(1, %(limit)s / 2)
),

hops AS (
    SELECT
        (
            SELECT o.scope FROM embed_assets.semantic_outbox AS o
            WHERE
                o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending' AND o.scope IS NOT NULL
            ORDER BY o.scope
            LIMIT 1
        ) AS scope,
        1 AS number
    FROM crowd
    UNION ALL
    SELECT
        (
            SELECT o.scope FROM embed_assets.semantic_outbox AS o
            WHERE o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending' AND o.scope > h.scope
            ORDER BY o.scope
            LIMIT 1
        ),
        h.number + 1
    FROM hops AS h
    WHERE h.scope IS NOT NULL AND h.number <= 50
),

waiting AS MATERIALIZED (
    SELECT h.scope, greatest(1, %(limit)s / 2 / count(*) OVER ()) AS share, count(*) OVER () AS scopes
    FROM hops AS h
    WHERE h.scope IS NOT NULL AND h.scope IS DISTINCT FROM (SELECT crowd.scope FROM crowd)
),

others AS MATERIALIZED (
    SELECT picked.*, w.share
    FROM waiting AS w
    CROSS JOIN LATERAL (
        SELECT o.kind, o.source_id, o.model_id, o.scope FROM embed_assets.semantic_outbox AS o
        WHERE
            o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending' AND o.scope = w.scope
            AND o.crashes < 2 AND o.timeouts < 2
            AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s)
        ORDER BY {order}
        LIMIT w.share
        FOR UPDATE SKIP LOCKED
    ) AS picked
),

candidates AS (
    SELECT
        f.*,
        f.scope IS NOT DISTINCT FROM crowd.scope
        AND row_number() OVER (PARTITION BY f.scope ORDER BY f.place) > greatest(1, %(limit)s / 2) AS beyond
    FROM first AS f LEFT JOIN crowd ON TRUE
    UNION ALL
    SELECT o.kind, o.source_id, o.model_id, o.scope, %(limit)s + 1, FALSE
    FROM others AS o
    WHERE (o.kind, o.source_id, o.model_id) NOT IN (SELECT f.kind, f.source_id, f.model_id FROM first AS f)
),

taken AS MATERIALIZED (
    SELECT c.kind, c.source_id, c.model_id FROM candidates AS c
    WHERE
        NOT c.beyond
        OR (
            coalesce((SELECT max(w.scopes) FROM waiting AS w), 0) < 50
            AND NOT EXISTS (SELECT FROM others AS o GROUP BY o.scope, o.share HAVING count(*) >= o.share)
        )
    ORDER BY c.beyond, c.place
    LIMIT %(limit)s
),

{lease};

-- name: suspect
-- An entry whose wave crashed or timed out twice goes alone, and only when nothing else is due.
WITH retries AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'retry_wait'
        AND o.next_attempt_at <= (SELECT clock_timestamp())
        AND (o.crashes >= 2 OR o.timeouts >= 2)
        AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    ORDER BY o.next_attempt_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
),

pending AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND (o.crashes >= 2 OR o.timeouts >= 2)
        AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    ORDER BY o.lane, o.rank, o.id
    LIMIT 1 - (SELECT count(*) FROM retries)
    FOR UPDATE SKIP LOCKED
),

taken AS (
    SELECT * FROM retries
    UNION ALL
    SELECT * FROM pending
),

{lease};

-- name: of_runs
-- What the closed waves of a re-executed run left: as new waves with new tokens. If another drain took the
-- entries meanwhile, this is empty.
WITH taken AS MATERIALIZED (
    SELECT o.kind, o.source_id, o.model_id FROM embed_assets.semantic_outbox AS o
    WHERE
        o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.status = 'pending'
        AND o.crashes < 2 AND o.timeouts < 2 {of_scope}
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
-- Entries are looked up by the keys that come out of the first half, not by constants: without statistics (the
-- table fills and empties all day) the planner would take a constant kind for one row and join quadratically.
wave AS (
    INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until, claimed)
    SELECT %(kind)s, %(model_id)s, %(run_id)s, clock_timestamp() + %(lease)s * interval '1 second', count(*)
    FROM taken
    HAVING count(*) > 0
    RETURNING wave_id, token, kind, model_id, run_id, claimed_at
),

leased AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET status = 'leased', wave_id = wave.wave_id, claims = o.claims + 1
    FROM taken, wave
    WHERE o.kind = taken.kind AND o.source_id = taken.source_id AND o.model_id = taken.model_id
    RETURNING o.id, o.source_id, o.forced
)

SELECT wave.*, leased.id AS entry_id, leased.source_id, leased.forced
FROM wave CROSS JOIN leased
ORDER BY leased.source_id;

-- name: of_scope
-- For a run of one scope: its entries and no others.
AND o.scope = %(scope)s

-- name: claimable
-- "Empty" is believed only when this says so: a claim may have skipped rows that somebody had locked.
-- A paused kind gives nothing, however much is due: whoever waits for it would wait for ever.
SELECT NOT EXISTS (
    SELECT FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s AND c.paused_at IS NOT NULL
) AND (
    EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE
            o.kind = %(kind)s AND o.model_id = ANY(%(models)s) AND o.status = 'pending'
            AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    ) OR EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE
            o.kind = %(kind)s AND o.model_id = ANY(%(models)s) AND o.status = 'retry_wait'
            AND o.next_attempt_at <= (SELECT clock_timestamp())
            AND (o.last_failed_at IS NULL OR o.last_failed_at < %(failed_before)s) {of_scope}
    )
) AS claimable;

-- name: next_wave_number
SELECT coalesce(max(w.wave_id), 0) + 1 AS number FROM embed_assets.claimed_waves AS w;

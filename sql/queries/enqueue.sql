-- What finds work: fold the feed, scan the source, reconcile facts. Under the lease of corpus_scans, in ranges with
-- a commit each. Every insert is ordered by key, which is the lock order of entries.

-- name: acquire_lease
-- One enqueuer per kind. A held row (a batch of another enqueuer commits) is a lease that is held.
WITH free AS (
    SELECT s.kind FROM embed_assets.corpus_scans AS s
    WHERE s.kind = %(kind)s AND (s.until IS NULL OR s.until <= clock_timestamp())
    FOR UPDATE SKIP LOCKED
)
UPDATE embed_assets.corpus_scans AS s
SET token = gen_random_uuid(), until = clock_timestamp() + %(lease)s * interval '1 second'
FROM free
WHERE s.kind = free.kind
RETURNING
    s.token,
    s.last_scan_at IS NULL
    OR s.last_scan_at <= clock_timestamp() - 20 * coalesce(s.seconds, 0) * interval '1 second' AS scan_due,
    s.last_reconcile_at IS NULL
    OR s.last_reconcile_at <= clock_timestamp() - %(reconcile_seconds)s * interval '1 second' AS reconcile_due;

-- name: hold_lease
-- First and last statement of each batch: fences an enqueuer that was taken over, and renews. Taken over means another
-- token: a batch that outlasts the lease holds its row, and nobody takes it over meanwhile.
UPDATE embed_assets.corpus_scans
SET until = clock_timestamp() + %(lease)s * interval '1 second'
WHERE kind = %(kind)s AND token = %(token)s
RETURNING token;

-- name: release_lease
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
-- Who folds takes the row away from everybody, so what no scan finds again is entered for whoever it is meant for: a
-- backfill's row for the models it was asked for, a forced one for every model that is searched or built. A plain change
-- is entered for the models of this process; others find it by their scans. Requests are held until this commits: who
-- cancels one comes before it, or finds what it entered.
WITH taken AS (
    DELETE FROM embed_assets.source_changes
    WHERE ctid = ANY(ARRAY(
        SELECT c.ctid FROM embed_assets.source_changes AS c
        WHERE c.kind = %(kind)s
        ORDER BY c.id
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING source_id AS given, reason, forced, lane, scope, request
),

asked AS MATERIALIZED (
    SELECT r.id, r.models, r.cancelled_at IS NOT NULL AS cancelled
    FROM embed_assets.reembed_requests AS r
    WHERE r.id IN (SELECT taken.request FROM taken)
    ORDER BY r.id
    FOR SHARE
),

merged AS (
    SELECT
        t.source_id,
        m.model_id,
        (array_agg(t.reason ORDER BY t.lane, t.reason))[1] AS reason,
        bool_or(t.forced) AS forced,
        min(t.lane) AS lane,
        max(t.scope) AS scope,
        max(t.request) AS request
    FROM (SELECT {canonical} AS source_id, taken.* FROM taken) AS t
    LEFT JOIN asked AS a ON a.id = t.request
    INNER JOIN embed_assets.corpora AS c ON c.kind = %(kind)s
    INNER JOIN embed_assets.corpus_models AS m ON m.kind = c.kind AND m.retired_at IS NULL
    WHERE
        t.source_id IS NOT NULL
        AND CASE
            WHEN a.id IS NOT NULL THEN m.model_id = ANY(a.models) AND NOT a.cancelled
            WHEN m.model_id = ANY(%(models)s) THEN TRUE
            ELSE t.forced AND m.model_id IN (c.active_model_id, c.target_model_id)
        END
    GROUP BY t.source_id, m.model_id
),

upserted AS (
    INSERT INTO embed_assets.semantic_outbox AS o
    (kind, source_id, model_id, scope, reason, lane, rank, forced, request)
    SELECT
        %(kind)s, e.source_id, e.model_id, coalesce(source.scope, e.scope), e.reason, e.lane,
        coalesce(source.rank, 'Infinity'), e.forced, e.request
    FROM merged AS e
    LEFT JOIN {source} AS source ON source.key = {e_key}
    ORDER BY e.source_id, e.model_id
    ON CONFLICT (kind, source_id, model_id) DO UPDATE SET
    requested_at = clock_timestamp(),
    forced = o.forced OR excluded.forced,
    lane = least(o.lane, excluded.lane),
    scope = coalesce(excluded.scope, o.scope),
    rank = excluded.rank,
    reason = excluded.reason,
    request = greatest(excluded.request, o.request),
    attempts = 0,
    crashes = 0,
    timeouts = 0,
    deaths = 0,
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
-- The key that ends the first %(size)s ones of a range; no row when it has fewer.
SELECT source.key AS bound FROM {source} AS source
WHERE (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
ORDER BY source.key
OFFSET %(size)s - 1
LIMIT 1;

-- name: scan_range
-- Indexable rows whose stamp is missing or says another revision. The anti-join on entries, not a merging
-- upsert: a scan must neither rewrite the backlog nor wait for writers. `kept` counts the stamps that are to stay,
-- so that the caller knows whether any is left over. The range of spellings keeps the join as small as the range.
-- A model that was retired since the scan began gets no entry, here and below: nobody would take it away again.
WITH ranged AS MATERIALIZED (
    SELECT source.source_id, source.revision, source.indexable, source.rank, source.scope
    FROM {source} AS source
    WHERE (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
),

judged AS MATERIALIZED (
    SELECT
        r.source_id,
        r.rank,
        r.scope,
        r.indexable,
        m.model_id,
        m.lane,
        s.source_id IS NOT NULL AS stamped,
        s.source_id IS NULL OR s.revision IS DISTINCT FROM r.revision AS stale
    FROM ranged AS r
    CROSS JOIN unnest(%(models)s::integer [], %(lanes)s::integer []) AS m (model_id, lane)
    LEFT JOIN embed_assets.semantic_stamps AS s
        ON s.kind = %(kind)s AND s.model_id = m.model_id AND s.source_id = r.source_id
        AND s.source_id >= (SELECT min(ranged.source_id) FROM ranged)
        AND s.source_id <= (SELECT max(ranged.source_id) FROM ranged)
),

inserted AS (
    INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, scope, reason, lane, rank)
    SELECT %(kind)s, j.source_id, j.model_id, j.scope, %(reason)s, j.lane, j.rank
    FROM judged AS j
    WHERE
        j.indexable AND j.stale
        AND j.model_id IN (
            SELECT alive.model_id FROM embed_assets.corpus_models AS alive
            WHERE alive.kind = %(kind)s AND alive.retired_at IS NULL
        )
        AND NOT EXISTS (
            SELECT FROM embed_assets.semantic_outbox AS o
            WHERE o.kind = %(kind)s AND o.source_id = j.source_id AND o.model_id = j.model_id
        )
    ORDER BY j.source_id, j.model_id
    ON CONFLICT (kind, source_id, model_id) DO NOTHING
    RETURNING source_id
)

SELECT
    (SELECT count(*) FROM inserted) AS created,
    count(*) FILTER (WHERE j.stamped AND j.indexable) AS kept
FROM judged AS j;

-- name: enter_unreadable
-- A range of one row that the database cannot read: entered by its key alone, so that its wave records why.
INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, lane)
SELECT %(kind)s, source.source_id, m.model_id, %(reason)s, m.lane
FROM {source} AS source
CROSS JOIN unnest(%(models)s::integer [], %(lanes)s::integer []) AS m (model_id, lane)
INNER JOIN embed_assets.corpus_models AS alive
    ON alive.kind = %(kind)s AND alive.model_id = m.model_id AND alive.retired_at IS NULL
WHERE (source.key > %(after)s OR %(after)s IS NULL) AND (source.key <= %(upto)s OR %(upto)s IS NULL)
ORDER BY source.source_id, m.model_id
ON CONFLICT (kind, source_id, model_id) DO NOTHING;

-- name: stamps
SELECT count(*) AS stamps FROM embed_assets.semantic_stamps AS s
WHERE s.kind = %(kind)s AND s.model_id = ANY(%(models)s);

-- name: stamp_bound
-- The stamp that ends the first %(size)s ones of a page of stamps.
SELECT s.source_id AS bound FROM embed_assets.semantic_stamps AS s
WHERE
    s.kind = %(kind)s AND s.model_id = %(model_id)s
    AND s.source_id > %(after)s AND (s.source_id <= %(upto)s OR %(upto)s IS NULL)
ORDER BY s.source_id
OFFSET %(size)s - 1
LIMIT 1;

-- name: clear_range
-- Stamped rows that are gone or not indexable are enqueued, so that a wave clears them.
INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, scope, reason, lane, rank)
SELECT %(kind)s, s.source_id, s.model_id, found.scope, %(reason)s, 0, coalesce(found.rank, 'Infinity')
FROM embed_assets.semantic_stamps AS s
LEFT JOIN LATERAL (
    SELECT source.indexable, source.rank, source.scope FROM {source} AS source WHERE source.key = {s_key}
    OFFSET 0
) AS found ON TRUE
WHERE
    s.kind = %(kind)s AND s.model_id = %(model_id)s
    AND s.source_id > %(after)s AND (s.source_id <= %(upto)s OR %(upto)s IS NULL)
    AND found.indexable IS NOT TRUE
    AND EXISTS (
        SELECT FROM embed_assets.corpus_models AS alive
        WHERE alive.kind = %(kind)s AND alive.model_id = %(model_id)s AND alive.retired_at IS NULL
    )
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

-- name: heal_lost
-- Facts again: the lease stands on the wave, so a leased entry whose wave is not there, or says that it took all its
-- entries along (a table restored without the other), would wait for ever. The numbers are found first and compared as
-- constants: joined under FOR UPDATE, an entry that is claimed meanwhile would be judged by its new wave, which this
-- statement cannot see.
WITH lost AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    WHERE
        e.kind = %(kind)s AND e.status = 'leased'
        AND e.wave_id = ANY(ARRAY(
            SELECT DISTINCT l.wave_id FROM embed_assets.semantic_outbox AS l
            WHERE
                l.kind = %(kind)s AND l.status = 'leased'
                AND NOT EXISTS (
                    SELECT FROM embed_assets.claimed_waves AS w
                    WHERE w.wave_id = l.wave_id AND (w.closed_at IS NULL OR w.outcome = 'expired')
                )
        ))
    ORDER BY e.source_id, e.model_id
    FOR UPDATE OF e SKIP LOCKED
)
UPDATE embed_assets.semantic_outbox AS o SET status = 'pending'
FROM lost
WHERE o.kind = lost.kind AND o.source_id = lost.source_id AND o.model_id = lost.model_id;

-- name: retired_with_entries
-- Facts again: whoever read a model just before it was retired may have entered rows for it just after.
SELECT m.model_id FROM embed_assets.corpus_models AS m
WHERE
    m.kind = %(kind)s AND m.retired_at IS NOT NULL
    AND EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o WHERE o.kind = m.kind AND o.model_id = m.model_id
    )
ORDER BY m.model_id;

-- name: chunk_bound
-- The key that ends the first %(size)s chunks of a range of keys.
SELECT c.{key} AS bound FROM {chunks} AS c
WHERE
    c.model_id = %(model_id)s
    AND (c.{key} > %(after)s OR %(after)s IS NULL) AND (c.{key} <= %(upto)s OR %(upto)s IS NULL)
ORDER BY c.{key}
OFFSET %(size)s - 1
LIMIT 1;

-- name: enter_unstamped
-- Facts again: chunks that no stamp speaks of (what pruning left of a row that has left search since, or stamps that
-- were not restored). No scan would find them, since it goes by the source and by the stamps.
INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, lane)
SELECT DISTINCT %(kind)s, found.source_id, {model_id}, %(reason)s, 0
FROM (
    SELECT c.{key}::text COLLATE "C" AS source_id FROM {chunks} AS c
    WHERE
        c.model_id = {model_id}
        AND (c.{key} > %(after)s OR %(after)s IS NULL) AND (c.{key} <= %(upto)s OR %(upto)s IS NULL)
) AS found
WHERE
    EXISTS (
        SELECT FROM embed_assets.corpus_models AS alive
        WHERE alive.kind = %(kind)s AND alive.model_id = {model_id} AND alive.retired_at IS NULL
    )
    AND NOT EXISTS (
        SELECT FROM embed_assets.semantic_stamps AS s
        WHERE s.kind = %(kind)s AND s.model_id = {model_id} AND s.source_id = found.source_id
    )
    AND NOT EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE o.kind = %(kind)s AND o.model_id = {model_id} AND o.source_id = found.source_id
    )
ORDER BY found.source_id
ON CONFLICT (kind, source_id, model_id) DO NOTHING;

-- name: dead_bound
-- The dead entry that ends the first %(size)s ones of a page of them.
SELECT e.source_id AS bound FROM embed_assets.semantic_outbox AS e
WHERE
    e.kind = %(kind)s AND e.model_id = ANY(%(models)s) AND e.status = 'dead'
    AND e.source_id > %(after)s AND (e.source_id <= %(upto)s OR %(upto)s IS NULL)
ORDER BY e.source_id
OFFSET %(size)s - 1
LIMIT 1;

-- name: revive_changed
-- Dead entries whose source changed come back; those whose source is gone come back to be cleared and settled.
WITH changed AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    LEFT JOIN {source} AS source ON source.key = {e_key}
    WHERE
        e.kind = %(kind)s AND e.model_id = ANY(%(models)s) AND e.status = 'dead'
        AND e.source_id > %(after)s AND (e.source_id <= %(upto)s OR %(upto)s IS NULL)
        AND (
            source.indexable IS NOT TRUE
            OR (e.revision_known AND e.revision IS DISTINCT FROM source.revision)
        )
    ORDER BY e.source_id, e.model_id
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
    dismissed_at = NULL,
    requested_at = clock_timestamp()
FROM changed
WHERE o.kind = changed.kind AND o.source_id = changed.source_id AND o.model_id = changed.model_id;

-- name: revive_parked
-- Transient dead letters whose park is over come back for another round of attempts. Dismissed ones stay.
WITH chosen AS MATERIALIZED (
    SELECT e.kind, e.source_id, e.model_id
    FROM embed_assets.semantic_outbox AS e
    WHERE
        e.kind = %(kind)s AND e.model_id = ANY(%(models)s) AND e.status = 'dead' AND e.dismissed_at IS NULL
        AND e.source_id > %(after)s AND (e.source_id <= %(upto)s OR %(upto)s IS NULL)
        AND embed_assets.parked_until(e.error_class, e.deaths, e.last_failed_at) <= (SELECT clock_timestamp())
    ORDER BY e.source_id, e.model_id
    FOR UPDATE OF e SKIP LOCKED
)
UPDATE embed_assets.semantic_outbox AS o
SET status = 'pending', attempts = 0, crashes = 0, timeouts = 0, next_attempt_at = NULL, reason = 'reconcile'
FROM chosen AS c
WHERE o.kind = c.kind AND o.source_id = c.source_id AND o.model_id = c.model_id;

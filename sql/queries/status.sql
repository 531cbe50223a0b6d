-- What is asked about the queue without changing it.

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
    ) + (
        -- Closed waves of which an entry is still leased: somebody had it locked when the wave was reaped.
        SELECT count(*) FROM embed_assets.claimed_waves AS w
        WHERE
            w.kind = %(kind)s AND w.outcome = 'expired' AND w.healed_at IS NULL
            AND EXISTS (
                SELECT FROM embed_assets.semantic_outbox AS e WHERE e.wave_id = w.wave_id AND e.status = 'leased'
            )
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
        -- Dead letters that the next reconcile brings back, counted once that is due.
        SELECT count(*) FROM (
            SELECT FROM embed_assets.semantic_outbox AS e
            INNER JOIN embed_assets.corpus_scans AS s ON s.kind = e.kind
            WHERE
                e.kind = %(kind)s AND e.model_id = ANY(%(models)s) AND e.status = 'dead' AND e.dismissed_at IS NULL
                AND embed_assets.parked_until(e.error_class, e.deaths, e.last_failed_at) <= (SELECT clock_timestamp())
                AND (
                    s.last_reconcile_at IS NULL
                    OR s.last_reconcile_at <= clock_timestamp() - %(reconcile_seconds)s * interval '1 second'
                )
            LIMIT %(limit)s
        ) AS bounded
    ) AS revivable,
    (
        SELECT extract(EPOCH FROM min(next_attempt_at) - clock_timestamp())::float8
        FROM embed_assets.semantic_outbox
        WHERE kind = %(kind)s AND model_id = ANY(%(models)s) AND status = 'retry_wait'
    ) AS next_due_seconds,
    (SELECT paused_at IS NOT NULL FROM embed_assets.corpora WHERE kind = %(kind)s) AS paused;

-- name: status
-- Every source row and every leftover stamp once; the first that applies. The row's own expressions come last, so
-- that a row which cannot be read is counted by what its entry says.
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
            WHEN o.status IS NULL AND NOT source.indexable AND s.source_id IS NOT NULL THEN 'due'
            WHEN source.indexable AND s.source_id IS NOT NULL
                AND s.revision IS NOT DISTINCT FROM source.revision THEN 'fresh'
            WHEN o.dismissed_at IS NOT NULL THEN 'dismissed'
            ELSE 'excluded'
        END AS state
    FROM {source} AS source
    LEFT JOIN embed_assets.semantic_stamps AS s
        ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
    LEFT JOIN embed_assets.semantic_outbox AS o
        ON o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = source.source_id
    LEFT JOIN (
        SELECT DISTINCT changed.source_id FROM embed_assets.source_changes AS changed WHERE changed.kind = %(kind)s
    ) AS feed ON feed.source_id = source.source_id
    UNION ALL
    SELECT
        CASE
            WHEN o.status = 'dead' AND o.dismissed_at IS NULL THEN 'dead'
            WHEN o.status = 'leased' THEN 'leased'
            WHEN o.status = 'retry_wait' THEN 'waiting'
            WHEN o.status = 'pending' OR o.status IS NULL THEN 'due'
            WHEN EXISTS (
                SELECT FROM embed_assets.source_changes AS changed
                WHERE changed.kind = s.kind AND changed.source_id = s.source_id
            ) THEN 'due'
            ELSE 'dismissed'
        END AS state
    FROM embed_assets.semantic_stamps AS s
    LEFT JOIN embed_assets.semantic_outbox AS o
        ON o.kind = s.kind AND o.model_id = s.model_id AND o.source_id = s.source_id
    WHERE
        s.kind = %(kind)s AND s.model_id = %(model_id)s
        AND NOT EXISTS (SELECT FROM {source} AS source WHERE source.key = {s_key})
) AS counted
GROUP BY counted.state;

-- name: stale_exists
-- The scan's own predicate: what the sensor asks when nobody says what changed. Without the anti-join on entries,
-- one dead letter would ask for runs for ever; it stands first, since a row that was entered may be one that cannot
-- be read. Aggregates, not EXISTS: hoping for an early hit the planner would probe row by row.
SELECT
    coalesce((
        SELECT bool_or(
            CASE
                WHEN o.source_id IS NOT NULL THEN FALSE
                WHEN source.indexable THEN s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision
                ELSE s.source_id IS NOT NULL
            END
        )
        FROM {source} AS source
        LEFT JOIN embed_assets.semantic_stamps AS s
            ON s.kind = %(kind)s AND s.model_id = %(model_id)s AND s.source_id = source.source_id
        LEFT JOIN embed_assets.semantic_outbox AS o
            ON o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = source.source_id
    ), FALSE)
    OR (
        SELECT count(*) FROM embed_assets.semantic_stamps AS s
        LEFT JOIN embed_assets.semantic_outbox AS o
            ON o.kind = s.kind AND o.model_id = s.model_id AND o.source_id = s.source_id
        WHERE
            s.kind = %(kind)s AND s.model_id = %(model_id)s AND o.source_id IS NULL
            AND NOT EXISTS (SELECT FROM {source} AS source WHERE source.key = {s_key})
    ) > 0
    OR EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS e
        LEFT JOIN LATERAL (
            SELECT source.indexable, source.revision FROM {source} AS source WHERE source.key = {e_key}
            OFFSET 0
        ) AS found ON TRUE
        WHERE
            e.kind = %(kind)s AND e.model_id = %(model_id)s AND e.status = 'dead'
            AND e.error_class NOT IN ('row_rejected', 'corrupt_row')
            AND (
                found.indexable IS NOT TRUE
                OR (e.revision_known AND e.revision IS DISTINCT FROM found.revision)
            )
    ) AS stale;

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

-- name: clock
SELECT clock_timestamp() AS now;

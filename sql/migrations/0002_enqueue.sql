-- "Say so": callable in any transaction, by any writer of the user's table. It only appends, so the
-- caller never waits for us. Any array whose elements have a text form names rows: ARRAY[1, 2],
-- array_agg(id), ARRAY['a', 'b']; composite keys are JSON arrays as text.
-- lane 0 is for changes, 1 for backfills that fresh changes may overtake. NULLs and unknown kinds are
-- the caller's to avoid: nothing raises here, since an error would abort the caller's transaction.
CREATE FUNCTION embed_assets.enqueue(
    kind text,
    ids anyarray,
    reason text DEFAULT 'write',
    forced boolean DEFAULT FALSE,
    lane integer DEFAULT 0,
    scope text DEFAULT NULL
) RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    WITH appended AS (
        INSERT INTO embed_assets.source_changes (kind, source_id, reason, forced, lane, scope)
        SELECT
            enqueue.kind,
            given.id::text,
            CASE WHEN enqueue.reason IN ('write', 'scan', 'reconcile', 'backfill', 'manual')
                THEN enqueue.reason ELSE 'manual' END,
            coalesce(enqueue.forced, FALSE),
            CASE WHEN enqueue.lane = 1 THEN 1 ELSE 0 END,
            enqueue.scope
        FROM unnest(enqueue.ids) AS given (id)
        WHERE given.id IS NOT NULL AND enqueue.kind IS NOT NULL
        RETURNING 1
    )
    SELECT count(*) FROM appended
$$;

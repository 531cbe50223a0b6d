-- "Say so": callable in any transaction, by any writer of the user's table. It only appends, so the
-- caller never waits for us. Any array whose elements have a text form names rows: ARRAY[1, 2],
-- array_agg(id), ARRAY['a', 'b']; composite keys are JSON arrays as text.
-- lane 0 is for changes, 1 for backfills that fresh changes may overtake. NULLs and unknown kinds are
-- the caller's to avoid: nothing raises here, since an error would abort the caller's transaction.
-- A list of strings from a driver that does not type it needs a cast: %s::text[].
--
-- A hint to whoever listens on channel semantic_outbox, payload = kind: off unless embed_assets.notify is on
-- (`ALTER DATABASE … SET embed_assets.notify = on`, or for a role or a session). Nobody needs it, since the queue is
-- looked at every second; it only shortens that second.
-- Off by default, because commits that notify queue behind each other in the whole database, and are refused while
-- its notification queue is full. Hence one hint for many changes: only the change that finds the feed empty speaks,
-- those that follow until the feed is folded do not; and none while the notification queue is half full.
-- Whatever goes wrong with the hint (a role that may write to the feed but not read it), the change is entered.
CREATE FUNCTION embed_assets.enqueue(
    kind text,
    ids anyarray,
    reason text DEFAULT 'write',
    forced boolean DEFAULT FALSE,
    lane integer DEFAULT 0,
    scope text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    number bigint;
BEGIN
    IF coalesce(current_setting('embed_assets.notify', TRUE), '') IN ('on', 'true', '1') THEN
        BEGIN
            PERFORM pg_notify('semantic_outbox', c.kind)
            FROM embed_assets.corpora AS c
            WHERE
                c.kind = enqueue.kind AND cardinality(enqueue.ids) > 0 AND pg_notification_queue_usage() < 0.5
                AND NOT EXISTS (SELECT FROM embed_assets.source_changes AS s WHERE s.kind = enqueue.kind);
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING 'embed_assets.notify: %', SQLERRM;
        END;
    END IF;
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
    SELECT count(*) INTO number FROM appended;
    RETURN number;
END
$$;

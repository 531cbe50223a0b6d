-- Purges, in bounded batches: each statement deletes at most %(limit)s rows and says how many.

-- name: log
DELETE FROM embed_assets.semantic_outbox_log
WHERE id IN (
    SELECT l.id FROM embed_assets.semantic_outbox_log AS l
    WHERE l.finished_at < (SELECT clock_timestamp()) - %(days)s * interval '1 day'
    ORDER BY l.finished_at
    LIMIT %(limit)s
);

-- name: waves
DELETE FROM embed_assets.claimed_waves
WHERE wave_id IN (
    SELECT w.wave_id FROM embed_assets.claimed_waves AS w
    WHERE
        w.closed_at < (SELECT clock_timestamp()) - %(days)s * interval '1 day'
        AND NOT EXISTS (SELECT FROM embed_assets.semantic_outbox AS o WHERE o.wave_id = w.wave_id)
    ORDER BY w.closed_at
    LIMIT %(limit)s
);

-- name: ledger
-- Paid-for vectors stay 48 h: long enough for any retry, and the chunk tables keep what was written.
DELETE FROM embed_assets.chunk_embeddings
WHERE ctid = ANY(ARRAY(
    SELECT l.ctid FROM embed_assets.chunk_embeddings AS l
    WHERE l.staged_at < (SELECT clock_timestamp()) - interval '48 hours'
    LIMIT %(limit)s
));

-- name: search_outbox
DELETE FROM embed_assets.search_outbox
WHERE id IN (
    SELECT s.id FROM embed_assets.search_outbox AS s
    WHERE s.at < (SELECT clock_timestamp()) - %(days)s * interval '1 day'
    ORDER BY s.id
    LIMIT %(limit)s
);

-- name: similar_invalidations
-- Of a kind whose similar items nobody computes, the feed is forgotten like the log.
DELETE FROM embed_assets.similar_invalidations
WHERE id IN (
    SELECT i.id FROM embed_assets.similar_invalidations AS i
    WHERE i.at < (SELECT clock_timestamp()) - %(days)s * interval '1 day'
    ORDER BY i.id
    LIMIT %(limit)s
);

-- name: plans
-- Plans of waves that are closed: a process that died between its last statement and its wave's end left them.
DELETE FROM embed_assets.wave_chunks
WHERE (wave_id, source_id, chunk_index) IN (
    SELECT p.wave_id, p.source_id, p.chunk_index
    FROM embed_assets.wave_chunks AS p
    LEFT JOIN embed_assets.claimed_waves AS w ON w.wave_id = p.wave_id
    WHERE w.wave_id IS NULL OR w.closed_at IS NOT NULL
    LIMIT %(limit)s
);

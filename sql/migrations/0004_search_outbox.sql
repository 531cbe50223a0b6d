-- What an external index consumes: one consumer for each kind, which asks, applies, acknowledges (docs/search.md).

-- Each row's newest change, for at most so many rows, the longest waiting first; `ids` are all changes of the row that
-- it stands for. Nothing is locked or taken: what is not acknowledged is handed out again.
CREATE FUNCTION embed_assets.search_changes(kind text, most integer DEFAULT 100)
RETURNS TABLE (source_id text, op text, ids bigint [])
LANGUAGE sql STABLE
AS $$
    WITH waiting AS MATERIALIZED (
        SELECT DISTINCT oldest.source_id
        FROM (
            SELECT s.source_id FROM embed_assets.search_outbox AS s
            WHERE s.kind = $1
            ORDER BY s.id
            LIMIT $2
        ) AS oldest
    )
    SELECT c.source_id, (array_agg(c.op ORDER BY c.id DESC))[1], array_agg(c.id ORDER BY c.id)
    FROM waiting AS w
    CROSS JOIN LATERAL (
        SELECT s.source_id, s.op, s.id FROM embed_assets.search_outbox AS s
        WHERE s.kind = $1 AND s.source_id = w.source_id
        OFFSET 0
    ) AS c
    GROUP BY c.source_id
    ORDER BY min(c.id)
$$;

-- Deletes exactly these changes and says how many there were. A change that came after they were handed out has an id
-- of its own, whenever it commits, so it is handed out next.
CREATE FUNCTION embed_assets.acknowledge_search_changes(ids bigint [])
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    WITH taken AS MATERIALIZED (
        SELECT s.id FROM embed_assets.search_outbox AS s
        WHERE s.id = ANY($1)
        ORDER BY s.id
        FOR UPDATE
    ),

    deleted AS (
        DELETE FROM embed_assets.search_outbox AS s
        USING taken AS t
        WHERE s.id = t.id
        RETURNING 1
    )

    SELECT count(*) FROM deleted
$$;

-- search_outbox: what an external index must be told. Its triggers and functions are made from the declaration, since
-- they join the user's table.

-- name: queue_all
-- After a switch, in its transaction. A row of which there are vectors of the active model is told anew; one of which
-- only the model of before has any leaves the index. The stamps say so alone: a row that does not belong in search just
-- now may do so a moment later, and its stamp would be as good as any; the write that clears it tells its removal.
INSERT INTO embed_assets.search_outbox (kind, source_id, op)
SELECT s.kind, s.source_id, CASE WHEN bool_or(s.model_id = k.active_model_id) THEN 'upsert' ELSE 'remove' END
FROM embed_assets.corpora AS k
INNER JOIN embed_assets.semantic_stamps AS s
    ON s.kind = k.kind AND s.model_id IN (k.active_model_id, k.previous_model_id)
WHERE k.kind = %(kind)s
GROUP BY s.kind, s.source_id
ORDER BY s.source_id;

-- name: function_source
SELECT p.prosrc AS body FROM pg_proc AS p WHERE p.oid = to_regprocedure(%(name)s);

-- name: trigger_missing
SELECT
    NOT EXISTS (SELECT FROM pg_trigger AS t WHERE t.tgrelid = to_regclass(%(chunks)s) AND t.tgname = %(trigger)s)
        AS missing;

-- name: tell_body
-- One statement of whoever writes chunks tells each row once: indexable rows of the active model only. Row by row, so
-- that another row which cannot be read hinders nobody's write.
BEGIN
    INSERT INTO embed_assets.search_outbox (kind, source_id, op)
    SELECT DISTINCT k.kind, source.source_id, 'upsert'
    FROM written AS w
    INNER JOIN embed_assets.corpora AS k ON k.kind = {kind} AND k.active_model_id = w.model_id
    CROSS JOIN LATERAL (
        SELECT found.source_id, found.indexable FROM {source} AS found WHERE found.key = w.{key}
        OFFSET 0
    ) AS source
    WHERE source.indexable
    ORDER BY source.source_id;
    RETURN NULL;
END

-- name: create_tell
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS {body};

-- name: create_insert_trigger
-- A trigger fires for statements that name its own table only: the parent has these two, and each partition.
CREATE TRIGGER tell_search_insert AFTER INSERT ON {chunks}
REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION {tell}();

-- name: create_update_trigger
CREATE TRIGGER tell_search_update AFTER UPDATE ON {chunks}
REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION {tell}();

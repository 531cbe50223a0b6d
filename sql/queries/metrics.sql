-- What `embed-assets metrics` reads: the views of migration 0006, and for each kind that is declared its rows by state.

-- name: view
SELECT * FROM embed_assets.{view};

-- name: rows
SELECT %(kind)s AS kind, s.state, s.rows FROM {function}() AS s;

-- name: made
-- The kinds whose rows can be counted: those that were opened since their function is made.
SELECT c.kind FROM embed_assets.corpora AS c
WHERE to_regprocedure(format('embed_assets.%%I()', 'status_' || c.kind)) IS NOT NULL
ORDER BY c.kind;

-- name: create_status
CREATE OR REPLACE FUNCTION {function}() RETURNS TABLE (state text, rows bigint)
LANGUAGE sql STABLE
AS {body};

-- name: target
-- Of the model that is kept fresh or built.
(
    SELECT coalesce(c.target_model_id, c.active_model_id) FROM embed_assets.corpora AS c
    WHERE c.kind = {kind}
)

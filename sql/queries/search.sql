-- Search knows only the active model, and joins the source at read time: a deleted or unindexable row vanishes
-- from results at once, whatever its chunks still say. Model and width are literals: a join to the active model would
-- scan every partition, and the index is one of an expression that holds the width.

-- name: settings
-- Rows that must not show and rows that a filter refuses are stepped over inside the index scan, which goes on until
-- it has enough (iterative). In relaxed order: what a later round of it finds nearer is put right by the sort that
-- follows; strict order would throw it away. Compiling a plan takes longer than any search.
SELECT
    set_config('hnsw.iterative_scan', 'relaxed_order', TRUE),
    set_config('hnsw.ef_search', '100', TRUE),
    set_config('jit', 'off', TRUE);

-- name: probe
-- The nearest chunks of rows that may show, by the index where there is one.
SELECT source.key, source.source_id, c.chunk_index, c.body, c.heading_path, {embedding} <=> {query} AS distance
FROM {chunks} AS c
INNER JOIN {source} AS source ON source.key = c.{key}
WHERE c.model_id = {model_id} AND source.indexable
ORDER BY {embedding} <=> {query}
LIMIT {depth};

-- name: nearest
-- Each row by its best chunk. More chunks are asked for than rows, since a row may have many; far more if these were
-- all of few rows; and where the index found too few (a filter that few rows pass), every chunk that may show is
-- looked at, the rows chosen first. Each step runs only if the one before it fell short.
WITH near AS MATERIALIZED ({near}),

best AS MATERIALIZED (
    SELECT DISTINCT ON (n.source_id) n.* FROM near AS n
    ORDER BY n.source_id, n.distance, n.chunk_index
),

wide AS MATERIALIZED (
    SELECT DISTINCT ON (n.source_id) n.* FROM ({wide}) AS n
    WHERE (SELECT count(*) FROM best) < {k} AND (SELECT count(*) FROM near) >= {near_depth}
    ORDER BY n.source_id, n.distance, n.chunk_index
),

exact AS MATERIALIZED (
    SELECT DISTINCT ON (source.source_id)
        source.key, source.source_id, c.chunk_index, c.body, c.heading_path, {embedding} <=> {query} AS distance
    FROM {source} AS source
    INNER JOIN {chunks} AS c ON c.{key} = source.key
    WHERE
        c.model_id = {model_id} AND source.indexable
        AND greatest((SELECT count(*) FROM best), (SELECT count(*) FROM wide)) < {k}
    ORDER BY source.source_id, distance, c.chunk_index
),

found AS MATERIALIZED (
    SELECT f.* FROM (
        SELECT b.* FROM best AS b WHERE (SELECT count(*) FROM best) >= {k}
        UNION ALL
        SELECT w.* FROM wide AS w WHERE (SELECT count(*) FROM wide) >= {k}
        UNION ALL
        SELECT e.* FROM exact AS e
    ) AS f
    ORDER BY f.distance, f.source_id
    LIMIT {k}
)

SELECT f.source_id, f.distance, f.chunk_index, f.body, f.heading_path, source.fields
FROM found AS f
INNER JOIN {source} AS source ON source.key = f.key
ORDER BY f.distance, f.source_id;

-- name: lexical
-- Where no query vector can be had: words of the question in the chunks, the best chunk of each row.
WITH best AS MATERIALIZED (
    SELECT DISTINCT ON (source.source_id)
        source.key,
        source.source_id,
        c.chunk_index,
        c.body,
        c.heading_path,
        ts_rank(to_tsvector('simple', c.body), words.query) AS score
    FROM {chunks} AS c
    INNER JOIN {source} AS source ON source.key = c.{key}
    CROSS JOIN
        to_tsquery('simple', array_to_string(tsvector_to_array(to_tsvector('simple', %(text)s)), ' | '))
        AS words (query)
    WHERE c.model_id = {model_id} AND source.indexable AND to_tsvector('simple', c.body) @@ words.query
    ORDER BY source.source_id, score DESC, c.chunk_index
)

SELECT b.source_id, b.score, b.chunk_index, b.body, b.heading_path, source.fields
FROM (SELECT * FROM best ORDER BY score DESC, source_id LIMIT {k}) AS b
INNER JOIN {source} AS source ON source.key = b.key
ORDER BY b.score DESC, b.source_id;

-- name: function_body
-- For any client that has a vector. The statement is planned with the active model's literals.
DECLARE
    model record;
BEGIN
    SELECT m.id, m.dimensions INTO model
    FROM embed_assets.corpora AS c
    INNER JOIN embed_assets.embedding_models AS m ON m.id = c.active_model_id
    WHERE c.kind = {kind};
    IF model.id IS NULL THEN
        RETURN;
    END IF;
    IF vector_dims($1) <> model.dimensions THEN
        RAISE EXCEPTION 'The query vector has % dimensions, the active model %.', vector_dims($1), model.dimensions
        USING HINT = 'Embed the question with the active model.';
    END IF;
    RETURN QUERY EXECUTE format(
        {statement},
        model.id,
        model.dimensions,
        CASE WHEN model.dimensions BETWEEN 2001 AND 4000 THEN 'halfvec' ELSE 'vector' END
    ) USING $1, $2;
END

-- name: load_vector
-- Only once pgvector's library is loaded are its settings known, and may anybody but a superuser name them.
SELECT vector_dims('[1]'::vector);

-- name: create_function
CREATE OR REPLACE FUNCTION {function}(query vector, k integer DEFAULT 10)
RETURNS TABLE (
    source_id text, distance double precision, chunk_index integer, body text, heading_path text, fields json
)
LANGUAGE plpgsql STABLE
SET hnsw.iterative_scan = 'relaxed_order'
SET hnsw.ef_search = '100'
SET jit = 'off'
AS {body};

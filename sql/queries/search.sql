-- Search knows only the active model, and joins the source at read time: a deleted or unindexable row vanishes
-- from results at once, whatever its chunks still say.

-- name: nearest
-- Exact: the best chunk of each row. The partition is named by its literal, the width by a literal too.
SELECT best.source_id, best.distance, best.body
FROM (
    SELECT DISTINCT ON (source.source_id)
        source.source_id,
        (c.embedding::vector({dimensions})) <=> %(query)s::vector({dimensions}) AS distance,
        c.body
    FROM {chunks} AS c
    INNER JOIN {source} AS source ON source.key = c.{key}
    WHERE c.model_id = {model_id} AND source.indexable
    ORDER BY source.source_id, distance, c.chunk_index
) AS best
ORDER BY best.distance, best.source_id
LIMIT %(k)s;

-- name: lexical
-- Where no query vector can be had: words of the question in the chunks, the best chunk of each row.
SELECT best.source_id, best.score, best.body
FROM (
    SELECT DISTINCT ON (source.source_id)
        source.source_id,
        ts_rank(to_tsvector('simple', c.body), words.query) AS score,
        c.body
    FROM {chunks} AS c
    INNER JOIN {source} AS source ON source.key = c.{key}
    CROSS JOIN
        to_tsquery('simple', array_to_string(tsvector_to_array(to_tsvector('simple', %(text)s)), ' | '))
        AS words (query)
    WHERE c.model_id = {model_id} AND source.indexable AND to_tsvector('simple', c.body) @@ words.query
    ORDER BY source.source_id, score DESC, c.chunk_index
) AS best
ORDER BY best.score DESC, best.source_id
LIMIT %(k)s;

-- name: titles
-- The prefix fields of hits, for people to read.
SELECT source.source_id, source.fields FROM {source} AS source
INNER JOIN unnest(%(ids)s::text []) AS e (source_id) ON source.key = {e_key};

-- Similar items: precomputed neighbours of each row, kept true by a job of their own. Only the active model's are read;
-- a row in similar_stale is to be computed (again): its computed_at is NULL, and its list of before serves until then.

-- name: create_table
-- Room on each page and no index of computed_at: nulling it touches no index.
CREATE TABLE IF NOT EXISTS {similar} (
    source_id text COLLATE "C" NOT NULL,
    model_id integer NOT NULL,
    neighbours text [] NOT NULL DEFAULT '{{}}',
    distances real [] NOT NULL DEFAULT '{{}}',
    computed_at timestamptz,
    stamp_revision text,
    PRIMARY KEY (source_id, model_id)
) WITH (fillfactor = 70);
CREATE INDEX IF NOT EXISTS {listed} ON {similar} USING gin (neighbours) WITH (fastupdate = off);

-- name: invalidate_all
-- Every row that the model has vectors of: appended to the feed, so that nobody waits for the job or holds it up.
INSERT INTO embed_assets.similar_invalidations (kind, source_id, model_id)
SELECT s.kind, s.source_id, s.model_id
FROM embed_assets.semantic_stamps AS s
WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s
ORDER BY s.source_id;

-- name: forget_model
WITH unmarked AS (
    DELETE FROM embed_assets.similar_stale WHERE kind = %(kind)s AND model_id = %(model_id)s
)
DELETE FROM {similar} WHERE model_id = %(model_id)s;

-- name: try_turn
-- One refresh of a kind at a time: two would overwrite each other's lists.
SELECT pg_try_advisory_lock(1701667430, c.lock_id) AS mine
FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s;

-- name: begin_turn
-- The session lock may be lost with its connection while the refresh goes on. This waits for a write that is under way,
-- and every later write under an older turn is refused.
UPDATE embed_assets.corpora SET similar_turn = gen_random_uuid() WHERE kind = %(kind)s RETURNING similar_turn AS turn;

-- name: hold_turn
SELECT kind FROM embed_assets.corpora WHERE kind = %(kind)s AND similar_turn = %(turn)s FOR SHARE;

-- name: take
-- The oldest invalidations, and the rows they speak of. One that another model's wave appended counts only if the row
-- has no vectors of the active model any more: then that wave cleared it.
WITH oldest AS MATERIALIZED (
    SELECT i.id FROM embed_assets.similar_invalidations AS i
    WHERE i.kind = %(kind)s
    ORDER BY i.id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
),

taken AS (
    DELETE FROM embed_assets.similar_invalidations AS i
    USING oldest AS o
    WHERE i.id = o.id
    RETURNING i.source_id, i.model_id
)

SELECT
    count(*) AS taken,
    coalesce(
        array_agg(DISTINCT t.source_id) FILTER (WHERE t.model_id = {model_id} OR s.source_id IS NULL), '{{}}'
    ) AS ids
FROM taken AS t
LEFT JOIN embed_assets.semantic_stamps AS s
    ON s.kind = %(kind)s AND s.model_id = {model_id} AND s.source_id = t.source_id;

-- name: mark
-- The rows themselves, where there are vectors to compute with.
INSERT INTO embed_assets.similar_stale (kind, model_id, source_id)
SELECT t.kind, t.model_id, t.source_id
FROM embed_assets.semantic_stamps AS t
WHERE t.kind = %(kind)s AND t.model_id = {model_id} AND t.source_id = ANY(%(ids)s)
ORDER BY t.source_id
ON CONFLICT (kind, model_id, source_id) DO NOTHING;

-- name: expand
-- The rows that list one of them: it may have moved away, and nobody knows who comes in its place. A look-up in the
-- index for each: asked for all at once, the planner would compare every list with every id.
INSERT INTO embed_assets.similar_stale (kind, model_id, source_id)
SELECT DISTINCT %(kind)s, {model_id}, listing.source_id
FROM unnest(%(ids)s::text []) AS g (source_id)
CROSS JOIN LATERAL (
    SELECT s.source_id FROM {similar} AS s
    WHERE s.model_id = {model_id} AND s.neighbours @> ARRAY[g.source_id]
    OFFSET 0
) AS listing
ORDER BY listing.source_id
ON CONFLICT (kind, model_id, source_id) DO NOTHING;

-- name: null_computed
WITH marked AS MATERIALIZED (
    SELECT s.source_id FROM {similar} AS s
    INNER JOIN embed_assets.similar_stale AS m
        ON m.kind = %(kind)s AND m.model_id = s.model_id AND m.source_id = s.source_id
    WHERE s.model_id = {model_id} AND s.computed_at IS NOT NULL
    ORDER BY s.source_id
    FOR UPDATE OF s
)
UPDATE {similar} AS s SET computed_at = NULL
FROM marked AS m WHERE s.source_id = m.source_id AND s.model_id = {model_id};

-- name: adopt
-- Rows that have vectors and no list: those of which the feed was forgotten, those that were unindexable for a moment.
INSERT INTO embed_assets.similar_stale (kind, model_id, source_id)
SELECT t.kind, t.model_id, t.source_id
FROM embed_assets.semantic_stamps AS t
INNER JOIN {source} AS source ON source.key = {t_key}
WHERE
    t.kind = %(kind)s AND t.model_id = {model_id} AND source.indexable
    AND NOT EXISTS (SELECT FROM {similar} AS s WHERE s.source_id = t.source_id AND s.model_id = t.model_id)
    AND NOT EXISTS (
        SELECT FROM embed_assets.similar_stale AS m
        WHERE m.kind = t.kind AND m.model_id = t.model_id AND m.source_id = t.source_id
    )
ORDER BY t.source_id
LIMIT %(limit)s
ON CONFLICT (kind, model_id, source_id) DO NOTHING;

-- name: stale
SELECT m.source_id FROM embed_assets.similar_stale AS m
WHERE m.kind = %(kind)s AND m.model_id = {model_id} AND m.source_id > %(after)s
ORDER BY m.source_id
LIMIT %(limit)s;

-- name: settings
-- As in search (search.settings); and nobody waits for an answer here, so each probe looks further.
SELECT
    set_config('hnsw.iterative_scan', 'relaxed_order', TRUE),
    set_config('hnsw.ef_search', '400', TRUE),
    set_config('jit', 'off', TRUE);

-- name: compute
-- One probe for each chunk, by the index where there is one; the rule holds inside the probe, so that a company of a
-- thousand like postings hides nobody. Two rows are as far apart as their nearest chunks. Vectors and the stamp that
-- speaks of them are of one snapshot. `candidates` are all that the probes met, the k nearest among them.
WITH wanted AS MATERIALIZED (
    SELECT w.source_id, {w_key} AS key, w.revision, w.embedded_at
    FROM embed_assets.semantic_stamps AS w
    WHERE w.kind = %(kind)s AND w.model_id = {model_id} AND w.source_id = ANY(%(ids)s)
),

pairs AS MATERIALIZED (
    SELECT w.source_id, near.source_id AS candidate, min(near.distance) AS distance
    FROM wanted AS w
    INNER JOIN {source} AS mine ON mine.key = w.key
    INNER JOIN {table} AS self ON self.{key} = w.key
    INNER JOIN {chunks} AS own ON own.{key} = w.key
    CROSS JOIN LATERAL (
        SELECT source.source_id, {embedding} <=> {own} AS distance
        FROM {chunks} AS c
        INNER JOIN {source} AS source ON source.key = c.{key}
        INNER JOIN {table} AS other ON other.{key} = c.{key}
        WHERE c.model_id = {model_id} AND c.{key} <> own.{key} AND source.indexable AND ({rule})
        ORDER BY {embedding} <=> {own}
        LIMIT %(depth)s
    ) AS near
    WHERE own.model_id = {model_id} AND mine.indexable
    GROUP BY w.source_id, near.source_id
)

SELECT
    w.source_id,
    w.revision,
    w.embedded_at,
    coalesce(array_agg(p.candidate ORDER BY p.distance, p.candidate) FILTER (WHERE p.candidate IS NOT NULL), '{{}}')
        AS candidates,
    coalesce(
        array_agg(p.distance::real ORDER BY p.distance, p.candidate) FILTER (WHERE p.candidate IS NOT NULL), '{{}}'
    ) AS distances
FROM wanted AS w
INNER JOIN {source} AS source ON source.key = w.key
LEFT JOIN pairs AS p ON p.source_id = w.source_id
WHERE source.indexable
GROUP BY w.source_id, w.revision, w.embedded_at
ORDER BY w.source_id;

-- name: write
-- Only if the vectors are still those that were read; else the wave that wrote others has invalidated the row again.
INSERT INTO {similar} AS s (source_id, model_id, neighbours, distances, computed_at, stamp_revision)
SELECT t.source_id, t.model_id, %(neighbours)s, %(distances)s, clock_timestamp(), t.revision
FROM embed_assets.semantic_stamps AS t
WHERE
    t.kind = %(kind)s AND t.model_id = {model_id} AND t.source_id = %(source_id)s
    AND t.revision IS NOT DISTINCT FROM %(revision)s AND t.embedded_at = %(embedded_at)s
ON CONFLICT (source_id, model_id) DO UPDATE SET
neighbours = excluded.neighbours,
distances = excluded.distances,
computed_at = excluded.computed_at,
stamp_revision = excluded.stamp_revision;

-- name: offer
-- A row that changed may belong in the lists of rows it is near to, which did not change and do not list it: it is put
-- in its place there, and the farthest falls out.
WITH given AS MATERIALIZED (
    SELECT g.source_id, g.owner, g.distance
    FROM unnest(%(sources)s::text [], %(owners)s::text [], %(distances)s::real []) AS g (source_id, owner, distance)
),

held AS MATERIALIZED (
    SELECT s.source_id, s.neighbours, s.distances
    FROM {similar} AS s
    WHERE
        s.model_id = {model_id}
        AND EXISTS (
            SELECT FROM given AS g
            WHERE
                g.owner = s.source_id AND g.source_id <> ALL(s.neighbours)
                AND (
                    cardinality(s.neighbours) < %(k)s OR g.distance < s.distances[cardinality(s.neighbours)]
                )
        )
    ORDER BY s.source_id
    FOR UPDATE
),

merged AS (
    SELECT ranked.owner, array_agg(ranked.source_id ORDER BY ranked.rank) AS neighbours,
        array_agg(ranked.distance ORDER BY ranked.rank) AS distances
    FROM (
        SELECT entry.*, row_number() OVER (PARTITION BY entry.owner ORDER BY entry.distance, entry.source_id) AS rank
        FROM (
            SELECT h.source_id AS owner, l.source_id, l.distance
            FROM held AS h CROSS JOIN LATERAL unnest(h.neighbours, h.distances) AS l (source_id, distance)
            UNION ALL
            SELECT g.owner, g.source_id, g.distance
            FROM given AS g
            INNER JOIN held AS h ON h.source_id = g.owner AND g.source_id <> ALL(h.neighbours)
            INNER JOIN {table} AS other ON other.{key} = {g_key}
            CROSS JOIN LATERAL (SELECT g.owner AS source_id) AS o
            INNER JOIN {table} AS self ON self.{key} = {o_key}
            WHERE {rule}
        ) AS entry
    ) AS ranked
    WHERE ranked.rank <= %(k)s
    GROUP BY ranked.owner
)
UPDATE {similar} AS s
SET neighbours = m.neighbours, distances = m.distances
FROM merged AS m
WHERE s.source_id = m.owner AND s.model_id = {model_id} AND s.neighbours IS DISTINCT FROM m.neighbours;

-- name: forget
-- Lists of rows that have no vectors any more, or may not be shown.
WITH gone AS MATERIALIZED (
    SELECT g.source_id FROM unnest(%(ids)s::text []) AS g (source_id)
    WHERE NOT EXISTS (
        SELECT FROM embed_assets.semantic_stamps AS t
        INNER JOIN {source} AS source ON source.key = {t_key}
        WHERE t.kind = %(kind)s AND t.model_id = {model_id} AND t.source_id = g.source_id AND source.indexable
    )
),

unmarked AS (
    DELETE FROM embed_assets.similar_stale AS m
    USING gone AS g
    WHERE m.kind = %(kind)s AND m.model_id = {model_id} AND m.source_id = g.source_id
)
DELETE FROM {similar} AS s
USING gone AS g
WHERE s.model_id = {model_id} AND s.source_id = g.source_id;

-- name: unmark
DELETE FROM embed_assets.similar_stale AS m
WHERE m.kind = %(kind)s AND m.model_id = {model_id} AND m.source_id = ANY(%(ids)s);

-- name: mark_all
INSERT INTO embed_assets.similar_stale (kind, model_id, source_id)
SELECT %(kind)s, s.model_id, s.source_id FROM {similar} AS s
WHERE s.model_id = {model_id}
ORDER BY s.source_id
ON CONFLICT (kind, model_id, source_id) DO NOTHING;

-- name: waiting
-- Is there anything to do? Bounded, whatever waits.
SELECT
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.similar_invalidations AS i WHERE i.kind = %(kind)s LIMIT %(limit)s
        ) AS bounded
    ) AS feed,
    (
        SELECT count(*) FROM (
            SELECT FROM embed_assets.similar_stale AS m
            WHERE m.kind = %(kind)s AND m.model_id = {model_id}
            LIMIT %(limit)s
        ) AS bounded
    ) AS stale;

-- name: chunks
-- Whether there are more chunks than may be compared without an index; bounded, since statistics come late.
SELECT count(*) >= %(limit)s AS many
FROM (SELECT FROM {chunks} AS c WHERE c.model_id = {model_id} LIMIT %(limit)s) AS bounded;

-- name: shown
SELECT n.source_id, n.distance, source.fields
FROM embed_assets.similar_to(%(kind)s, %(id)s, %(k)s) WITH ORDINALITY AS n (source_id, distance, rank)
INNER JOIN unnest(ARRAY[n.source_id]) AS e (source_id) ON TRUE
INNER JOIN {source} AS source ON source.key = {e_key}
ORDER BY n.rank;

-- name: function_body
-- The list of the active model; while that has none yet, the one of the model before. Never of both.
BEGIN
    RETURN QUERY
    WITH list AS MATERIALIZED (
        SELECT s.source_id, s.neighbours, s.distances
        FROM {similar} AS s
        INNER JOIN embed_assets.corpora AS k
            ON k.kind = {kind} AND s.model_id IN (k.active_model_id, k.previous_model_id)
        WHERE s.source_id = $1
        ORDER BY s.model_id = k.active_model_id DESC
        LIMIT 1
    )
    SELECT e.source_id, e.distance
    FROM list AS w
    CROSS JOIN LATERAL unnest(w.neighbours, w.distances) WITH ORDINALITY AS e (source_id, distance, rank)
    INNER JOIN {source} AS source ON source.key = {e_key}
    INNER JOIN {table} AS other ON other.{key} = source.key
    INNER JOIN {table} AS self ON self.{key} = {w_key}
    WHERE source.indexable AND ({rule})
    ORDER BY e.rank
    LIMIT $2;
END

-- name: create_function
CREATE OR REPLACE FUNCTION {function}(id text, k integer DEFAULT 20)
RETURNS TABLE (source_id text, distance real)
LANGUAGE plpgsql STABLE
AS {body};

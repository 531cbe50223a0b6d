-- The chunk tables: made from the declaration, filled by one write transaction per wave.
-- The model's number is written into the statement as a literal, so that the planner sees one partition.

-- name: create_chunk_table
-- Key first in the primary key: all chunks of a row lie together. No foreign key to the source: it would make
-- the user's deletes wait for us, forbid TRUNCATE and freeze the table at ATTACH. Rows whose source is gone
-- vanish from results at once, since search joins the source.
CREATE TABLE IF NOT EXISTS {chunks} (
    {key} {key_type} NOT NULL,
    chunk_index integer NOT NULL,
    model_id integer NOT NULL,
    text_hash bytea NOT NULL,
    body text NOT NULL,
    heading_path text,
    embedding vector NOT NULL,
    PRIMARY KEY ({key}, chunk_index, model_id)
) PARTITION BY LIST (model_id);

-- name: create_partition
-- Never PARTITION OF: it would lock the parent against every search while it waits.
-- Vectors up to 8 kB stay in their row; larger ones go out of line by themselves.
CREATE TABLE {partition} (
    LIKE {chunks} INCLUDING DEFAULTS,
    CONSTRAINT one_model CHECK (model_id = {model_id}),
    CONSTRAINT own_width CHECK (vector_dims(embedding) = {dimensions})
) WITH (
    toast_tuple_target = 8160,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05
);

-- name: create_partition_key
ALTER TABLE {partition} ADD PRIMARY KEY ({key}, chunk_index, model_id);

-- name: create_partition_hash_index
CREATE INDEX ON {partition} (text_hash);

-- name: attach_partition
ALTER TABLE {chunks} ATTACH PARTITION {partition} FOR VALUES IN ({model_id});

-- name: partition_attached
SELECT EXISTS (
    SELECT FROM pg_inherits WHERE inhparent = to_regclass(%(chunks)s) AND inhrelid = to_regclass(%(partition)s)
) AS attached;

-- name: sizes
-- How many bytes each row of a wave will load, so that slices can be cut. Nothing is detoasted.
SELECT e.source_id, coalesce(source.bytes, 0) AS bytes
FROM embed_assets.semantic_outbox AS e
LEFT JOIN {source} AS source ON source.key = {e_key}
WHERE e.kind = %(kind)s AND e.model_id = {model_id} AND e.wave_id = %(wave_id)s AND e.status = 'leased'
ORDER BY e.source_id;

-- name: load
-- Text, revision and indexable in one query: a stamp must never name a revision other than the one whose text
-- was embedded. Texts come only for rows that are to be embedded.
SELECT
    e.source_id,
    e.forced,
    source.key IS NOT NULL AS present,
    source.indexable IS TRUE AS indexable,
    source.revision,
    s.source_id IS NOT NULL AND s.revision IS NOT DISTINCT FROM source.revision AS stamped,
    coalesce(source.bytes > %(max_bytes)s, FALSE) AS oversize,
    CASE
        WHEN
            source.indexable AND source.bytes <= %(max_bytes)s
            AND (e.forced OR s.source_id IS NULL OR s.revision IS DISTINCT FROM source.revision)
            THEN source.texts
    END AS texts,
    source.fields
FROM embed_assets.semantic_outbox AS e
LEFT JOIN {source} AS source ON source.key = {e_key}
LEFT JOIN embed_assets.semantic_stamps AS s
    ON s.kind = e.kind AND s.model_id = e.model_id AND s.source_id = e.source_id
WHERE
    e.kind = %(kind)s AND e.model_id = {model_id} AND e.wave_id = %(wave_id)s AND e.status = 'leased'
    AND e.source_id = ANY(%(ids)s)
ORDER BY e.source_id;

-- name: note_revision
-- A suspect that kills its process cannot say afterwards what it was: noted before work on it begins, so that it
-- comes back from the dead when its source changes. Suspects are alone in their wave.
UPDATE embed_assets.semantic_outbox AS o
SET revision = %(revision)s, revision_known = TRUE
WHERE
    o.kind = %(kind)s AND o.model_id = %(model_id)s AND o.source_id = ANY(%(ids)s)
    AND o.wave_id = %(wave_id)s AND o.status = 'leased' AND (o.crashes >= 2 OR o.timeouts >= 2);

-- name: unplan
-- A row that is planned anew (smaller chunks) drops its first plan.
DELETE FROM embed_assets.wave_chunks
WHERE wave_id = %(wave_id)s AND source_id = ANY(%(ids)s);

-- name: count_kept
-- With each request that is kept, in its transaction; nothing where the lease is lost, though what was paid for stays.
UPDATE embed_assets.claimed_waves
SET texts = texts + %(texts)s, tokens = tokens + %(tokens)s
WHERE
    wave_id = %(wave_id)s AND token = %(token)s AND closed_at IS NULL AND lease_until > clock_timestamp();

-- name: copy_plan
COPY embed_assets.wave_chunks
(wave_id, source_id, chunk_index, text_hash, body, heading_path, action, chunk_count, revision)
FROM STDIN (FORMAT BINARY);

-- name: missing
-- The hashes of a slice for which no vector is had: not in any row's chunk of this model, not in the ledger.
-- A forced entry accepts only what was staged after it was requested. OFFSET 0 keeps each look-up an index probe,
-- whatever the planner believes of tables that fill and empty all day.
SELECT DISTINCT n.text_hash
FROM {planned} AS p
CROSS JOIN LATERAL (
    SELECT c.text_hash FROM embed_assets.wave_chunks AS c
    WHERE c.wave_id = %(wave_id)s AND c.source_id = p.source_id AND c.chunk_index >= 0
    OFFSET 0
) AS n
WHERE
    NOT EXISTS (
        SELECT FROM embed_assets.chunk_embeddings AS l
        WHERE
            l.model_id = {model_id} AND l.text_hash = n.text_hash
            AND (NOT p.forced OR l.staged_at > p.requested_at)
        OFFSET 0
    )
    AND (
        p.forced
        OR NOT EXISTS (
            SELECT FROM {chunks} AS c
            WHERE c.model_id = {model_id} AND c.text_hash = n.text_hash
            OFFSET 0
        )
    );

-- name: copy_ledger
COPY embed_assets.chunk_embeddings (model_id, text_hash, embedding, tokens) FROM STDIN (FORMAT BINARY);

-- name: lock_kind_shared
-- Switch and pause take it exclusively; a row lock would let a stream of writers starve them.
SELECT pg_advisory_xact_lock_shared(1701667428, c.lock_id)
FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s;

-- name: planned
-- Stands as `planned` in the statements below: the entries this write is about, each with its plan's header. An
-- entry that a statement put back to pending is none any more.
SELECT
    e.kind,
    e.source_id,
    e.model_id,
    e.reason,
    e.claims,
    e.attempts,
    e.forced,
    e.requested_at,
    e.enqueued_at,
    h.action,
    h.chunk_count,
    h.revision
FROM embed_assets.semantic_outbox AS e
CROSS JOIN LATERAL (
    SELECT w.action, w.chunk_count, w.revision FROM embed_assets.wave_chunks AS w
    WHERE w.wave_id = %(wave_id)s AND w.source_id = e.source_id AND w.chunk_index = -1
    OFFSET 0
) AS h
WHERE
    e.kind = %(kind)s AND e.model_id = {model_id} AND e.wave_id = %(wave_id)s AND e.status = 'leased'
    AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL);

-- name: requeue_unplanned
-- No header means the plan was lost; no plan is not zero chunks.
UPDATE embed_assets.semantic_outbox AS e
SET status = 'pending'
WHERE
    e.kind = %(kind)s AND e.model_id = {model_id} AND e.wave_id = %(wave_id)s AND e.status = 'leased'
    AND (e.source_id = ANY(%(ids)s) OR %(ids)s::text [] IS NULL)
    AND NOT EXISTS (
        SELECT FROM embed_assets.wave_chunks AS h
        WHERE h.wave_id = %(wave_id)s AND h.source_id = e.source_id AND h.chunk_index = -1
        OFFSET 0
    );

-- name: upsert_chunks
-- Only positions whose hash or heading differs are written (all of a forced entry), so unchanged chunks leave
-- the index alone. Vectors: the row's own old chunks, the ledger, any row's chunk. A source of which a vector is
-- missing is left out and goes back to pending in this same statement: in two, a purge between them would
-- leave a silently short row.
WITH changed AS MATERIALIZED (
    SELECT
        p.kind, p.source_id, p.model_id, {p_key} AS key, p.forced, p.requested_at, n.chunk_index, n.text_hash,
        n.body, n.heading_path
    FROM {planned} AS p
    CROSS JOIN LATERAL (
        SELECT w.chunk_index, w.text_hash, w.body, w.heading_path FROM embed_assets.wave_chunks AS w
        WHERE w.wave_id = %(wave_id)s AND w.source_id = p.source_id AND w.chunk_index >= 0
        OFFSET 0
    ) AS n
    LEFT JOIN {chunks} AS old
        ON old.{key} = {p_key} AND old.chunk_index = n.chunk_index AND old.model_id = {model_id}
    WHERE
        p.forced OR old.text_hash IS DISTINCT FROM n.text_hash
        OR old.heading_path IS DISTINCT FROM n.heading_path
),

resolved AS MATERIALIZED (
    SELECT
        n.*,
        CASE
            WHEN n.forced THEN (
                SELECT l.embedding FROM embed_assets.chunk_embeddings AS l
                WHERE l.model_id = {model_id} AND l.text_hash = n.text_hash AND l.staged_at > n.requested_at
                ORDER BY l.staged_at DESC
                LIMIT 1
            )
            ELSE coalesce(
                (
                    SELECT c.embedding FROM {chunks} AS c
                    WHERE c.model_id = {model_id} AND c.{key} = n.key AND c.text_hash = n.text_hash
                    LIMIT 1
                ),
                (
                    SELECT l.embedding FROM embed_assets.chunk_embeddings AS l
                    WHERE l.model_id = {model_id} AND l.text_hash = n.text_hash
                    ORDER BY l.staged_at DESC
                    LIMIT 1
                ),
                (
                    SELECT c.embedding FROM {chunks} AS c
                    WHERE c.model_id = {model_id} AND c.text_hash = n.text_hash
                    LIMIT 1
                )
            )
        END AS embedding
    FROM changed AS n
),

short AS MATERIALIZED (
    SELECT DISTINCT r.kind, r.source_id, r.model_id FROM resolved AS r WHERE r.embedding IS NULL
),

requeued AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET status = 'pending'
    FROM short AS s
    WHERE o.kind = s.kind AND o.source_id = s.source_id AND o.model_id = s.model_id
)

INSERT INTO {chunks} AS c ({key}, chunk_index, model_id, text_hash, body, heading_path, embedding)
SELECT r.key, r.chunk_index, {model_id}, r.text_hash, r.body, r.heading_path, r.embedding
FROM resolved AS r
WHERE r.source_id NOT IN (SELECT s.source_id FROM short AS s)
ORDER BY r.key, r.chunk_index
ON CONFLICT ({key}, chunk_index, model_id) DO UPDATE SET
text_hash = excluded.text_hash,
body = excluded.body,
heading_path = excluded.heading_path,
embedding = excluded.embedding;

-- name: delete_chunks
-- Positions beyond the new count; of a row that is to be cleared, every chunk of every model.
WITH surplus AS MATERIALIZED (
    SELECT c.{key} AS key, c.chunk_index, c.model_id
    FROM {planned} AS p
    INNER JOIN {chunks} AS c ON c.{key} = {p_key}
    WHERE
        p.action IN ('clear', 'gone')
        OR (p.action = 'embed' AND c.model_id = {model_id} AND c.chunk_index >= p.chunk_count)
    ORDER BY c.{key}, c.chunk_index, c.model_id
    FOR UPDATE OF c
)
DELETE FROM {chunks} AS c
USING surplus AS s
WHERE c.{key} = s.key AND c.chunk_index = s.chunk_index AND c.model_id = s.model_id;

-- name: short_sources
-- Planned = present, asserted: a row here is a defect of ours, and the transaction is abandoned.
SELECT p.source_id, p.chunk_count AS planned, n.present
FROM {planned} AS p
CROSS JOIN LATERAL (
    SELECT count(*) AS present FROM {chunks} AS c WHERE c.{key} = {p_key} AND c.model_id = {model_id}
) AS n
WHERE p.action = 'embed' AND p.chunk_count <> n.present;

-- name: stamp
-- The revision that was loaded, not the one that is there now: a later change shows as a difference.
INSERT INTO embed_assets.semantic_stamps AS s (kind, model_id, source_id, revision, chunk_count, wave_id)
SELECT p.kind, p.model_id, p.source_id, p.revision, p.chunk_count, %(wave_id)s
FROM {planned} AS p
WHERE p.action = 'embed'
ORDER BY p.source_id
ON CONFLICT (kind, model_id, source_id) DO UPDATE SET
revision = excluded.revision,
chunk_count = excluded.chunk_count,
embedded_at = clock_timestamp(),
wave_id = excluded.wave_id;

-- name: tell_search
-- The chunk table's triggers tell the rows that they saw written while they belonged in search. Told here is what they
-- do not see: a row that only became shorter, and one that was unindexable for the moment in which they looked. Nobody
-- else would tell it: if it is indexable again by the next look, its stamp is as good as any.
INSERT INTO embed_assets.search_outbox (kind, source_id, op)
SELECT p.kind, p.source_id, 'upsert'
FROM {planned} AS p
INNER JOIN embed_assets.corpora AS k ON k.kind = p.kind AND k.active_model_id = p.model_id
WHERE
    p.action = 'embed'
    AND NOT EXISTS (
        SELECT FROM embed_assets.search_outbox AS told
        WHERE told.kind = p.kind AND told.source_id = p.source_id AND told.xmin = pg_current_xact_id()::xid
    )
ORDER BY p.source_id;

-- name: unstamp
-- A cleared row loses its stamp of every model; where search knew it, the removal is told.
WITH cleared AS MATERIALIZED (
    SELECT s.kind, s.model_id, s.source_id
    FROM {planned} AS p
    CROSS JOIN embed_assets.embedding_models AS m
    INNER JOIN embed_assets.semantic_stamps AS s
        ON s.kind = p.kind AND s.model_id = m.id AND s.source_id = p.source_id
    WHERE p.action IN ('clear', 'gone')
    ORDER BY s.source_id, s.model_id
    FOR UPDATE OF s
),

unstamped AS (
    DELETE FROM embed_assets.semantic_stamps AS s
    USING cleared AS c
    WHERE s.kind = c.kind AND s.model_id = c.model_id AND s.source_id = c.source_id
    RETURNING s.kind, s.source_id, s.model_id
)

INSERT INTO embed_assets.search_outbox (kind, source_id, op)
SELECT u.kind, u.source_id, 'remove'
FROM unstamped AS u
INNER JOIN embed_assets.corpora AS k ON k.kind = u.kind AND k.active_model_id = u.model_id
ORDER BY u.source_id;

-- name: forget_legacy
-- Where the user's table still has a vector column of old, a cleared row's is nulled. A row that somebody holds is
-- left as it is: this statement alone touches the user's table, and it waits for nobody.
WITH held AS MATERIALIZED (
    SELECT t.{key} AS key
    FROM {table} AS t
    WHERE
        t.{key} = ANY(ARRAY(SELECT {p_key} FROM {planned} AS p WHERE p.action = 'clear'))
        AND t.{legacy} IS NOT NULL
    ORDER BY t.{key}
    FOR UPDATE SKIP LOCKED
)
UPDATE {table} AS t SET {legacy} = NULL
FROM held WHERE t.{key} = held.key;

-- name: invalidate_similar
-- Appended for every row of the wave, whatever became of it.
INSERT INTO embed_assets.similar_invalidations (kind, source_id, model_id)
SELECT p.kind, p.source_id, p.model_id
FROM {planned} AS p
ORDER BY p.source_id;

-- name: actions
-- What is done with each row of this write, for the hooks of its declaration.
SELECT p.source_id, p.action FROM {planned} AS p ORDER BY p.source_id;

-- name: succeeded
-- Rows of a wave that are done with: indexed, and not back in the queue since.
SELECT DISTINCT l.source_id
FROM embed_assets.semantic_outbox_log AS l
WHERE
    l.kind = %(kind)s AND l.source_id = ANY(%(ids)s) AND l.wave_id = %(wave_id)s AND l.outcome = 'indexed'
    AND NOT EXISTS (
        SELECT FROM embed_assets.semantic_outbox AS o
        WHERE o.kind = l.kind AND o.source_id = l.source_id AND o.model_id = l.model_id
    )
ORDER BY l.source_id;

-- name: settle
-- The last look at the source, late and of one table. Entries leave, or go back to pending when the row is no
-- longer what was loaded or was requested again after the claim; forced ones stay forced, since what they asked for is
-- not there yet, and requested_at keeps what was bought since from being bought again. Every outcome is logged.
WITH done AS MATERIALIZED (
    SELECT
        p.*,
        p.requested_at > %(claimed_at)s AS requested_again,
        CASE
            WHEN p.action IN ('clear', 'gone') THEN source.indexable IS TRUE
            ELSE source.indexable IS NOT TRUE OR source.revision IS DISTINCT FROM p.revision
        END AS changed
    FROM {planned} AS p
    LEFT JOIN {source} AS source ON source.key = {p_key}
),

back AS (
    UPDATE embed_assets.semantic_outbox AS o
    SET
        status = 'pending',
        attempts = 0,
        crashes = 0,
        timeouts = 0,
        next_attempt_at = NULL
    FROM done AS d
    WHERE
        o.kind = d.kind AND o.source_id = d.source_id AND o.model_id = d.model_id
        AND (d.changed OR d.requested_again)
),

others AS (
    -- A clear takes the vectors of every model. Of a row that belongs in search again, each model must look anew: what
    -- the others' own waves found there, or had just written, may be what is deleted here.
    INSERT INTO embed_assets.semantic_outbox AS o (kind, source_id, model_id, scope, reason, rank)
    SELECT d.kind, d.source_id, m.model_id, own.scope, own.reason, own.rank
    FROM done AS d
    INNER JOIN embed_assets.semantic_outbox AS own
        ON own.kind = d.kind AND own.source_id = d.source_id AND own.model_id = d.model_id
    INNER JOIN embed_assets.corpus_models AS m
        ON m.kind = d.kind AND m.model_id <> d.model_id AND m.retired_at IS NULL
    WHERE d.action IN ('clear', 'gone') AND d.changed
    ORDER BY d.source_id, m.model_id
    ON CONFLICT (kind, source_id, model_id) DO UPDATE SET requested_at = clock_timestamp()
),

finished AS (
    DELETE FROM embed_assets.semantic_outbox AS o
    USING done AS d
    WHERE
        o.kind = d.kind AND o.source_id = d.source_id AND o.model_id = d.model_id
        AND NOT (d.changed OR d.requested_again)
),

logged AS (
    INSERT INTO embed_assets.semantic_outbox_log
    (
        kind, source_id, model_id, outcome, reason, claims, attempts, chunks, reused, tokens, enqueued_at, claimed_at,
        run_id, wave_id
    )
    SELECT
        d.kind,
        d.source_id,
        d.model_id,
        CASE d.action WHEN 'embed' THEN 'indexed' WHEN 'clear' THEN 'removed' ELSE d.action END,
        d.reason,
        d.claims,
        d.attempts,
        d.chunk_count,
        paid.reused,
        paid.tokens,
        d.enqueued_at,
        %(claimed_at)s,
        %(run_id)s,
        %(wave_id)s
    FROM done AS d
    LEFT JOIN LATERAL (
        -- Bought since the claim, or had before: what this row cost.
        SELECT count(*) FILTER (WHERE n.tokens IS NULL) AS reused, coalesce(sum(n.tokens), 0) AS tokens
        FROM (
            SELECT (
                SELECT max(l.tokens) FROM embed_assets.chunk_embeddings AS l
                WHERE l.model_id = {model_id} AND l.text_hash = w.text_hash AND l.staged_at > %(claimed_at)s
            ) AS tokens
            FROM embed_assets.wave_chunks AS w
            WHERE w.wave_id = %(wave_id)s AND w.source_id = d.source_id AND w.chunk_index >= 0
            OFFSET 0
        ) AS n
    ) AS paid ON d.action = 'embed'
    ORDER BY d.source_id
)

SELECT
    count(*) FILTER (WHERE d.action = 'embed') AS indexed,
    count(*) FILTER (WHERE d.action = 'clear') AS removed,
    count(*) FILTER (WHERE d.action = 'gone') AS gone,
    count(*) FILTER (WHERE d.action = 'superseded') AS superseded,
    count(*) FILTER (WHERE d.changed OR d.requested_again) AS back
FROM done AS d;

-- What binds a declaration to a database: its table, its key, its model.

-- name: table_of
SELECT c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name, c.relkind AS kind
FROM pg_class AS c INNER JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(%(table)s);

-- name: columns_of
SELECT
    a.attname AS name,
    t.typname AS type,
    a.attnotnull AS not_null,
    cn.nspname AS collation_schema,
    c.collname AS collation,
    coalesce(c.collisdeterministic, TRUE) AS deterministic
FROM pg_attribute AS a
INNER JOIN pg_type AS t ON t.oid = a.atttypid
LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
LEFT JOIN pg_namespace AS cn ON cn.oid = c.collnamespace
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped;

-- name: key_is_unique
SELECT EXISTS (
    SELECT FROM pg_index AS i
    INNER JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE
        i.indrelid = %(oid)s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
        AND i.indnkeyatts = 1 AND a.attname = %(key)s
) AS is_unique;

-- name: try_source
-- Plans and types every fragment of the declaration without reading a row.
SELECT
    source.key, source.source_id, source.revision, source.indexable, source.rank, source.scope, source.texts,
    source.fields
FROM {source} AS source
LIMIT 0;

-- name: try_rule
-- In this scope a name that does not say whether it is `self` or `other` is refused.
SELECT 1 AS one FROM {table} AS self CROSS JOIN {table} AS other
WHERE {rule}
LIMIT 0;

-- name: hidden_by_row_security
SELECT c.relrowsecurity AND NOT pg_has_role(c.relowner, 'USAGE') AND NOT r.rolbypassrls AND NOT r.rolsuper AS hidden
FROM pg_class AS c CROSS JOIN pg_roles AS r
WHERE c.oid = %(oid)s AND r.rolname = current_user;

-- name: register_kind
INSERT INTO embed_assets.corpora (kind) VALUES (%(kind)s) ON CONFLICT (kind) DO NOTHING;

-- name: register_scan
INSERT INTO embed_assets.corpus_scans (kind) VALUES (%(kind)s) ON CONFLICT (kind) DO NOTHING;

-- name: corpus
SELECT c.kind, c.lock_id, c.active_model_id, c.previous_model_id, c.target_model_id, c.paused_at
FROM embed_assets.corpora AS c WHERE c.kind = %(kind)s;

-- name: model_of
SELECT m.id, m.dimensions FROM embed_assets.embedding_models AS m WHERE m.identity = %(identity)s;

-- name: add_model
-- Select first, insert only when missing: an upsert per start would burn the sequence.
INSERT INTO embed_assets.embedding_models (identity, dimensions)
VALUES (%(identity)s, %(dimensions)s)
ON CONFLICT (identity) DO NOTHING;

-- name: identity_of_target
SELECT m.id, m.identity, m.dimensions
FROM embed_assets.corpora AS c INNER JOIN embed_assets.embedding_models AS m ON m.id = c.target_model_id
WHERE c.kind = %(kind)s;

-- name: identity_of_active
SELECT m.id, m.identity, m.dimensions
FROM embed_assets.corpora AS c INNER JOIN embed_assets.embedding_models AS m ON m.id = c.active_model_id
WHERE c.kind = %(kind)s;

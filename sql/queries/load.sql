-- Loading a file: every line is staged in a table of the session first, then merged at once, all in
-- one transaction. {table} is the user's table, {columns} what the file may write.

-- name: session
-- A timestamp without zone means UTC, whatever the session is set to.
SELECT set_config('TimeZone', 'UTC', TRUE), set_config('DateStyle', 'ISO, YMD', TRUE);

-- name: relation
-- NULL when there is no such table. The name is quoted by the caller.
SELECT to_regclass(%(table)s)::oid AS oid;

-- name: columns
-- What can be written, and how: generated columns cannot. is_serial: the database numbers it, so a
-- field of the same name is another thing. is_key: the only column of the primary key.
SELECT
    a.attname AS name,
    format_type(a.atttypid, a.atttypmod) AS type,
    a.attnotnull AS is_required,
    (a.attidentity <> '' OR a.atthasdef) AS has_default,
    a.attidentity = 'a' AS is_locked,
    (a.attidentity <> '' OR (a.atthasdef AND coalesce(k.indisprimary, FALSE))) AS is_serial,
    coalesce(k.indisprimary, FALSE) AS is_key
FROM pg_attribute AS a
LEFT JOIN pg_index AS k ON k.indrelid = a.attrelid AND k.indisprimary AND k.indkey::text = a.attnum::text
WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attnum;

-- name: is_unique
-- ON CONFLICT (external_id) needs an immediate unique index on exactly this column, over all rows.
SELECT count(*) > 0 AS is_unique
FROM pg_index AS i
INNER JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attname = 'external_id'
WHERE
    i.indrelid = %(oid)s AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL
    AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum;

-- name: check_constant
SELECT %(value)s::{type} AS value;

-- name: lock
-- One load of a table at a time: two would take the rows of a file in each other's way.
SELECT pg_advisory_xact_lock(hashtextextended('embed_assets.load', %(oid)s::bigint));

-- name: stage
-- Columns have the types of the table, so that staging a line proves that it can be written. load_fields
-- has a 1 for each column of {columns} that the line gave and a 0 for the others.
CREATE TEMPORARY TABLE load_stage AS
SELECT NULL::bigint AS load_line, NULL::text AS load_fields, NULL::text AS load_outcome, {columns}
FROM {table}
WITH NO DATA;

-- name: copy
COPY load_stage (load_line, load_fields, {columns}) FROM STDIN;

-- name: index_stage
CREATE INDEX ON load_stage (external_id, load_line);

-- name: analyze_stage
ANALYZE load_stage;

-- name: drop_repeats
-- Last wins: a later line replaces an earlier one of the same external_id. Lists the first twenty.
WITH repeated AS (
    DELETE FROM load_stage AS earlier
    WHERE
        EXISTS (
            SELECT FROM load_stage AS later
            WHERE later.external_id = earlier.external_id AND later.load_line > earlier.load_line
        )
    RETURNING load_line, external_id
),
numbered AS (
    SELECT
        load_line,
        external_id::text AS external_id,
        row_number() OVER (ORDER BY load_line) AS n,
        count(*) OVER () AS total
    FROM repeated
)
SELECT load_line, external_id, total FROM numbered WHERE n <= 20 ORDER BY n;

-- name: field_sets
SELECT DISTINCT load_fields FROM load_stage ORDER BY load_fields;

-- name: upsert
-- The lines that gave exactly {columns}: a column they did not give keeps its value, or gets its default.
-- A row that already says the same is not touched, so an unchanged file makes nothing stale.
-- `existing` reads the table as it was before this statement.
WITH written AS (
    INSERT INTO {table} AS existing ({columns})
    SELECT {columns} FROM load_stage WHERE load_fields = %(fields)s ORDER BY external_id
    ON CONFLICT (external_id) DO UPDATE SET {assignments}
    WHERE ROW({old_values}) IS DISTINCT FROM ROW({new_values})
    RETURNING external_id
)
UPDATE load_stage
SET load_outcome = CASE WHEN existing.external_id IS NULL THEN 'inserted' ELSE 'updated' END
FROM written
LEFT JOIN {table} AS existing ON existing.external_id = written.external_id
WHERE load_stage.external_id = written.external_id;

-- name: link_duplicates
-- duplicate_of names an external_id, of this file or of the table; digits that match none are a key.
-- A name that nothing has, or the row's own, leaves NULL and is counted.
WITH linked AS (
    SELECT
        stage.external_id,
        stage.duplicate_of IS NOT NULL AS is_named,
        CASE
            WHEN original.external_id IS NOT NULL THEN nullif(original.{key}, self.{key})
            WHEN stage.duplicate_of ~ '^[0-9]{{1,18}}$' THEN nullif(stage.duplicate_of::bigint, self.{key})
        END AS original_key
    FROM load_stage AS stage
    INNER JOIN {table} AS self ON self.external_id = stage.external_id
    LEFT JOIN {table} AS original ON original.external_id = stage.duplicate_of
    WHERE substr(stage.load_fields, %(position)s, 1) = '1'
),
written AS (
    UPDATE {table} AS self
    SET duplicate_of = linked.original_key
    FROM linked
    WHERE self.external_id = linked.external_id AND self.duplicate_of IS DISTINCT FROM linked.original_key
    RETURNING self.external_id
),
noted AS (
    UPDATE load_stage
    SET load_outcome = coalesce(load_outcome, 'updated')
    FROM written
    WHERE load_stage.external_id = written.external_id
)
SELECT count(*) AS unresolved FROM linked WHERE is_named AND original_key IS NULL;

-- name: close_missing
-- The database's clock. Rows without external_id came from elsewhere and are not the file's to close.
WITH closed AS (
    UPDATE {table} AS existing
    SET closed_at = clock_timestamp()
    WHERE
        existing.closed_at IS NULL AND existing.external_id IS NOT NULL
        AND NOT EXISTS (SELECT FROM load_stage WHERE load_stage.external_id = existing.external_id)
    RETURNING existing.external_id
)
SELECT count(*) AS closed FROM closed;

-- name: counts
SELECT
    count(*) FILTER (WHERE load_outcome = 'inserted') AS inserted,
    count(*) FILTER (WHERE load_outcome = 'updated') AS updated,
    count(*) FILTER (WHERE load_outcome IS NULL) AS unchanged
FROM load_stage;

-- name: drop_stage
DROP TABLE load_stage;

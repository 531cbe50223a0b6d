-- The user's table as every other query sees it.

-- name: row
-- A subquery of its own, so that a declaration's fragments see one table's columns and no column of ours can be
-- mistaken, nor of a search's filter, which stands here too. The planner drops what a query does not ask for: texts
-- are fetched by `load` alone.
SELECT
    (self.{key})::{key_type} AS key,
    self.{key}::text COLLATE "C" AS source_id,
    ({revision})::text AS revision,
    ({indexable}) IS TRUE AS indexable,
    {rank} AS rank,
    ({scope})::text COLLATE "C" AS scope,
    {bytes} AS bytes,
    ARRAY[{texts}] AS texts,
    json_build_object({fields}) AS fields
FROM {table} AS self
WHERE {key_fits} AND ({where});

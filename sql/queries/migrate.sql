-- Migrations are applied once, in order, under one advisory lock.

-- name: lock
SELECT pg_advisory_lock(1701667428, 0);

-- name: lock_transaction
-- What is made from a declaration is made by one process at a time, and not while migrations run.
SELECT pg_advisory_xact_lock(1701667428, 0);

-- name: unlock
SELECT pg_advisory_unlock(1701667428, 0);

-- name: schema_exists
SELECT to_regclass('embed_assets.schema_migrations') IS NOT NULL AS exists;

-- name: create_schema
-- Looked for first: IF NOT EXISTS asks for the right to make schemas in the database even where this one is there.
DO $$
BEGIN
    IF to_regnamespace('embed_assets') IS NULL THEN
        CREATE SCHEMA embed_assets;
    END IF;
END
$$;

-- name: create_table
CREATE TABLE IF NOT EXISTS embed_assets.schema_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: applied
SELECT number, name, checksum FROM embed_assets.schema_migrations ORDER BY number;

-- name: record
INSERT INTO embed_assets.schema_migrations (number, name, checksum)
VALUES (%(number)s, %(name)s, %(checksum)s);

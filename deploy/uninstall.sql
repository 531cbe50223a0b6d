-- Remove everything of embed_assets from a database. Your tables stay as they are. Stop the daemon, the runs and every
-- `embed-assets drain` first. Afterwards: DROP DATABASE of Dagster's storage, DROP ROLE of the four roles.

BEGIN;

-- A trigger of yours that calls embed_assets would fail each write of its table.
DO $$
DECLARE
    calling text;
BEGIN
    SELECT string_agg(format('%I on %s', t.tgname, t.tgrelid::regclass), ', ') INTO calling
    FROM pg_trigger AS t
    INNER JOIN pg_proc AS p ON p.oid = t.tgfoid
    INNER JOIN pg_class AS c ON c.oid = t.tgrelid
    WHERE c.relnamespace <> 'embed_assets'::regnamespace AND (
        p.pronamespace = 'embed_assets'::regnamespace OR p.prosrc LIKE '%embed_assets.%'
    );
    IF calling IS NOT NULL THEN
        RAISE EXCEPTION 'Triggers call embed_assets: %.', calling USING HINT = 'Drop them first.';
    END IF;
END
$$;

DROP SCHEMA embed_assets CASCADE;

COMMIT;

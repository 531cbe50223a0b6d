-- Roles with no more rights than their work needs. Run once, by a role that may make roles, schemas and extensions,
-- in the database of your tables, before the first `embed-assets migrate`. Then \password for those who log in.
--
--   embed_worker    migrates, drains and operates: DATABASE_URL of the code server, the runs and the command line
--   embed_producer  may say that rows changed (embed_assets.enqueue): grant it to the roles that write your tables
--   embed_reader    searches: grant it to the roles of your applications
--   embed_monitor   reads the numbers of the metrics views, and no row

CREATE EXTENSION IF NOT EXISTS vector;

CREATE ROLE embed_worker LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE;
CREATE ROLE embed_producer NOLOGIN;
CREATE ROLE embed_reader NOLOGIN;
CREATE ROLE embed_monitor LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE;

-- Its own schema is all that the worker may change.
CREATE SCHEMA embed_assets AUTHORIZATION embed_worker;
GRANT USAGE ON SCHEMA embed_assets TO embed_producer, embed_reader, embed_monitor;

-- The check xmin_age names who holds a snapshot open; without this it sees the worker's own sessions only.
GRANT pg_read_all_stats TO embed_worker;

-- One line for each table that you declare. SELECT suffices: your tables are never written, locked or altered.
-- Where row security hides rows of it: ALTER ROLE embed_worker BYPASSRLS.
GRANT USAGE ON SCHEMA public TO embed_worker;
GRANT SELECT ON public.jobs TO embed_worker;

-- Forget a kind: its vectors, its queue, its log. Your table stays. Take the kind out of EMBED_CORPORA and restart
-- first, else the next run makes it again. Edit the three names below; run it as embed_worker.

BEGIN;

DO $$
<<remove_kind>>
DECLARE
    kind CONSTANT text := 'jobs';
    chunks CONSTANT text := 'job_semantic_chunks';
    neighbours CONSTANT text := 'similar_jobs';
    state text;
    made regprocedure;
BEGIN
    IF EXISTS (
        SELECT FROM embed_assets.claimed_waves AS w
        WHERE w.kind = remove_kind.kind AND w.closed_at IS NULL AND w.lease_until > clock_timestamp()
    ) THEN
        RAISE EXCEPTION 'A run still works on %.', kind USING HINT = 'Pause it, or terminate the run.';
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS embed_assets.%I, embed_assets.%I', chunks, neighbours);
    FOR made IN
        SELECT p.oid FROM pg_proc AS p
        WHERE
            p.pronamespace = 'embed_assets'::regnamespace
            AND p.proname IN ('search_' || kind, 'similar_to_' || kind, 'status_' || kind, 'tell_search_' || kind)
    LOOP
        EXECUTE format('DROP FUNCTION %s', made);
    END LOOP;
    FOR state IN
        SELECT c.table_name FROM information_schema.columns AS c
        INNER JOIN information_schema.tables AS t USING (table_schema, table_name)
        WHERE c.table_schema = 'embed_assets' AND c.column_name = 'kind' AND t.table_type = 'BASE TABLE'
        ORDER BY c.table_name
    LOOP
        EXECUTE format('DELETE FROM embed_assets.%I WHERE kind = %L', state, kind);
    END LOOP;
END
$$;

COMMIT;

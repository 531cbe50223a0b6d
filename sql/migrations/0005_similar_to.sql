-- The neighbours of a row, the nearest first, for any client. What was closed, hidden or deleted since they were
-- computed is left out. Each kind has a function of its own, made from its declaration: similar_to_<kind>.
CREATE FUNCTION embed_assets.similar_to(kind text, id text, k integer DEFAULT 20)
RETURNS TABLE (source_id text, distance real)
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF to_regprocedure(format('embed_assets.%I(text, integer)', 'similar_to_' || $1)) IS NULL THEN
        RAISE EXCEPTION 'No similar items are kept of kind "%".', $1
        USING HINT = 'Declare similar=Similar(…) for it and open it once.';
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT s.source_id, s.distance FROM embed_assets.%I($1, $2) AS s', 'similar_to_' || $1
    ) USING $2, $3;
END
$$;

-- Similar items: precomputed neighbours of each row, kept true by a job of their own.

-- name: invalidate_all
-- Every row that the model has vectors of: appended to the feed, so that nobody waits for the job or holds it up.
INSERT INTO embed_assets.similar_invalidations (kind, source_id, model_id)
SELECT s.kind, s.source_id, s.model_id
FROM embed_assets.semantic_stamps AS s
WHERE s.kind = %(kind)s AND s.model_id = %(model_id)s
ORDER BY s.source_id;

-- name: forget_model
DELETE FROM {similar} WHERE model_id = %(model_id)s;

-- What code says that changes rows of an indexed table, in its own transaction.

-- name: begin
-- Begins the caller's transaction, where it has none yet.
SELECT TRUE AS begun;

-- name: announce
SELECT embed_assets.enqueue(
    %(kind)s, %(ids)s::text [], %(reason)s, %(forced)s, %(lane)s, %(scope)s
) AS appended;

-- search_outbox: what an external index must be told. Its triggers and functions are made from the declaration, since
-- they join the user's table.

-- name: queue_all
-- Told once more, each row that belongs in search: the active model has changed, hence every vector.
INSERT INTO embed_assets.search_outbox (kind, source_id, op)
SELECT %(kind)s, source.source_id, 'upsert'
FROM {source} AS source
WHERE source.indexable
ORDER BY source.source_id;

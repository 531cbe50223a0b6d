-- Rights on what the worker made. Run it as embed_worker after the first drain of a kind, and again for each new kind
-- with its chunk table and functions. Your applications need SELECT on the source table too: search joins it.

GRANT INSERT ON embed_assets.source_changes TO embed_producer;

GRANT SELECT ON embed_assets.corpora, embed_assets.corpus_models, embed_assets.embedding_models TO embed_reader;
-- On the parent only: a model's partitions come and go.
GRANT SELECT ON embed_assets.job_semantic_chunks TO embed_reader;

GRANT SELECT ON
embed_assets.queue_metrics, embed_assets.lease_metrics, embed_assets.work_metrics, embed_assets.failure_metrics,
embed_assets.feed_metrics, embed_assets.endpoint_metrics
TO embed_monitor;

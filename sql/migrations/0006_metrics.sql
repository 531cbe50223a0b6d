-- What a monitor reads. A row per kind and model, of failures also per code: never a source id nor a scope, which would
-- make a series of each row and tell whoever sees the monitor what is in the table.

CREATE VIEW embed_assets.queue_metrics AS
SELECT
    c.kind,
    m.identity AS model,
    count(*) FILTER (
        WHERE e.status = 'pending' OR (e.status = 'retry_wait' AND e.next_attempt_at <= clock.now)
    ) AS due,
    extract(EPOCH FROM max(clock.now - e.enqueued_at) FILTER (
        WHERE e.status = 'pending' OR (e.status = 'retry_wait' AND e.next_attempt_at <= clock.now)
    ))::float8 AS oldest_due_seconds,
    count(*) FILTER (WHERE e.status = 'retry_wait' AND e.next_attempt_at > clock.now) AS waiting,
    count(*) FILTER (WHERE e.status = 'leased') AS running,
    count(*) FILTER (WHERE e.status = 'dead' AND e.dismissed_at IS NULL) AS dead,
    count(e.dismissed_at) AS dismissed
FROM embed_assets.corpus_models AS c
INNER JOIN embed_assets.embedding_models AS m ON m.id = c.model_id
CROSS JOIN (SELECT clock_timestamp() AS now) AS clock
LEFT JOIN embed_assets.semantic_outbox AS e ON e.kind = c.kind AND e.model_id = c.model_id
WHERE c.retired_at IS NULL
GROUP BY c.kind, m.identity;

-- expiring: not renewed for long. A lease of 45 s or more that is kept alive has never less than 30 s left.
CREATE VIEW embed_assets.lease_metrics AS
SELECT
    c.kind,
    m.identity AS model,
    count(*) FILTER (WHERE w.lease_until > clock.now) AS held,
    count(*) FILTER (WHERE w.lease_until > clock.now AND w.lease_until <= clock.now + interval '30 s') AS expiring,
    count(*) FILTER (WHERE w.lease_until <= clock.now) AS expired
FROM embed_assets.corpus_models AS c
INNER JOIN embed_assets.embedding_models AS m ON m.id = c.model_id
CROSS JOIN (SELECT clock_timestamp() AS now) AS clock
LEFT JOIN embed_assets.claimed_waves AS w ON w.kind = c.kind AND w.model_id = c.model_id AND w.closed_at IS NULL
WHERE c.retired_at IS NULL
GROUP BY c.kind, m.identity;

-- Failures that stand, by code.
CREATE VIEW embed_assets.failure_metrics AS
SELECT
    e.kind,
    m.identity AS model,
    e.error_code,
    count(*) FILTER (WHERE e.status = 'retry_wait') AS waiting,
    count(*) FILTER (WHERE e.status = 'dead') AS dead
FROM embed_assets.semantic_outbox AS e
INNER JOIN embed_assets.embedding_models AS m ON m.id = e.model_id
WHERE e.status IN ('retry_wait', 'dead') AND e.dismissed_at IS NULL
GROUP BY e.kind, m.identity, e.error_code;

-- The work of the last hour. Seconds to searchable: from the entry (the fold or the scan) to its vectors' commit.
CREATE VIEW embed_assets.work_metrics AS
SELECT
    c.kind,
    m.identity AS model,
    entries.indexed,
    entries.removed,
    entries.dead,
    entries.chunks,
    entries.searchable_p50_seconds,
    entries.searchable_p95_seconds,
    waves.waves,
    waves.texts,
    waves.tokens,
    waves.stage_seconds,
    waves.write_seconds
FROM embed_assets.corpus_models AS c
INNER JOIN embed_assets.embedding_models AS m ON m.id = c.model_id
CROSS JOIN LATERAL (
    SELECT
        count(*) FILTER (WHERE l.outcome = 'indexed') AS indexed,
        count(*) FILTER (WHERE l.outcome IN ('removed', 'gone')) AS removed,
        count(*) FILTER (WHERE l.outcome = 'dead') AS dead,
        coalesce(sum(l.chunks) FILTER (WHERE l.outcome = 'indexed'), 0) AS chunks,
        percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(EPOCH FROM l.finished_at - l.enqueued_at)::float8)
            FILTER (WHERE l.outcome = 'indexed') AS searchable_p50_seconds,
        percentile_cont(0.95) WITHIN GROUP (ORDER BY extract(EPOCH FROM l.finished_at - l.enqueued_at)::float8)
            FILTER (WHERE l.outcome = 'indexed') AS searchable_p95_seconds
    FROM embed_assets.semantic_outbox_log AS l
    WHERE l.kind = c.kind AND l.model_id = c.model_id AND l.finished_at > clock_timestamp() - interval '1 hour'
) AS entries
CROSS JOIN LATERAL (
    SELECT
        count(*) AS waves,
        coalesce(sum(w.texts), 0) AS texts,
        coalesce(sum(w.tokens), 0) AS tokens,
        coalesce(sum(w.stage_seconds), 0) AS stage_seconds,
        coalesce(sum(w.write_seconds), 0) AS write_seconds
    FROM embed_assets.claimed_waves AS w
    WHERE
        w.kind = c.kind AND w.model_id = c.model_id AND w.outcome = 'written'
        AND w.closed_at > clock_timestamp() - interval '1 hour'
) AS waves
WHERE c.retired_at IS NULL;

-- What waits in the feeds, counted up to 10,000: said by writers (source), for an external index (search), for the
-- neighbours (similar).
CREATE VIEW embed_assets.feed_metrics AS
SELECT c.kind, feed.feed, feed.rows, extract(EPOCH FROM clock_timestamp() - feed.oldest)::float8 AS oldest_seconds
FROM embed_assets.corpora AS c
CROSS JOIN LATERAL (
    SELECT 'source' AS feed, count(*) AS rows, min(s.at) AS oldest FROM (
        SELECT f.at FROM embed_assets.source_changes AS f WHERE f.kind = c.kind ORDER BY f.id LIMIT 10000
    ) AS s
    UNION ALL
    SELECT 'search', count(*), min(s.at) FROM (
        SELECT f.at FROM embed_assets.search_outbox AS f WHERE f.kind = c.kind ORDER BY f.id LIMIT 10000
    ) AS s
    UNION ALL
    SELECT 'similar', count(*), min(s.at) FROM (
        SELECT f.at FROM embed_assets.similar_invalidations AS f WHERE f.kind = c.kind ORDER BY f.id LIMIT 10000
    ) AS s
) AS feed;

-- The embedding endpoints by what they are (a hash of address and key, cut short), and for how long they rest.
CREATE VIEW embed_assets.endpoint_metrics AS
SELECT
    left(e.endpoint, 8) AS endpoint,
    CASE WHEN e.until > clock_timestamp() THEN e.state ELSE 'ok' END AS state,
    greatest(extract(EPOCH FROM e.until - clock_timestamp()), 0)::float8 AS resting_seconds
FROM embed_assets.embedding_endpoints AS e;

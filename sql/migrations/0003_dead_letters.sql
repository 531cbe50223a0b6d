-- Dead letters: when the reconciler may bring one back, and what an operator sees of them.

-- Whether another attempt could ever succeed without a change of source, identity or rules (errors.RULES).
CREATE FUNCTION embed_assets.is_deterministic(error_class text) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT error_class IN ('input_rejected', 'too_large', 'corrupt_row', 'LEASE_ATTEMPTS_EXHAUSTED')
$$;

-- Until when a dead letter is parked: the first two deaths come back at the next reconcile, later ones after 30 min
-- doubling up to 6 h. Deterministic ones never by themselves. The sweep and the operator's view ask this function.
CREATE FUNCTION embed_assets.parked_until(error_class text, deaths integer, last_failed_at timestamptz)
RETURNS timestamptz
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE
        WHEN embed_assets.is_deterministic(error_class) THEN 'infinity'::timestamptz
        WHEN deaths <= 2 THEN last_failed_at
        ELSE last_failed_at + least(interval '30 minutes' * power(2, least(deaths - 3, 10)), interval '6 hours')
    END
$$;

-- One row per unit that died: occurrences, first and last failure, last success, and until when it is parked.
CREATE VIEW embed_assets.dead_letters AS
SELECT
    e.kind,
    e.source_id,
    e.model_id,
    e.error_code,
    e.error_class,
    e.error_message,
    e.failures AS occurrences,
    e.first_failed_at,
    e.last_failed_at,
    (
        SELECT max(l.finished_at) FROM embed_assets.semantic_outbox_log AS l
        WHERE l.kind = e.kind AND l.source_id = e.source_id AND l.model_id = e.model_id AND l.outcome = 'indexed'
    ) AS last_success_at,
    CASE
        WHEN embed_assets.parked_until(e.error_class, e.deaths, e.last_failed_at) > clock_timestamp()
            THEN embed_assets.parked_until(e.error_class, e.deaths, e.last_failed_at)
    END AS parked_until,
    e.dismissed_at
FROM embed_assets.semantic_outbox AS e
WHERE e.status = 'dead';

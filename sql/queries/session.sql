-- What every worker transaction is made of.

-- name: begin
-- READ COMMITTED (set on the connection, it must come with BEGIN): the protocol's re-reads need fresh snapshots.
-- row_security off raises instead of hiding rows. A range of a scan is hashed in memory.
-- Fixed formats, since revisions become text. The timeouts keep a stuck statement from holding the user's table.
SELECT
    set_config('row_security', 'off', TRUE),
    set_config('TimeZone', 'UTC', TRUE),
    set_config('DateStyle', 'ISO, YMD', TRUE),
    set_config('IntervalStyle', 'postgres', TRUE),
    set_config('bytea_output', 'hex', TRUE),
    set_config('extra_float_digits', '1', TRUE),
    set_config('work_mem', '32MB', TRUE),
    set_config('statement_timeout', %(statement_timeout)s, TRUE),
    set_config('lock_timeout', %(lock_timeout)s, TRUE),
    set_config('idle_in_transaction_session_timeout', %(idle_timeout)s, TRUE);

-- name: lock_timeout
SELECT set_config('lock_timeout', %(lock_timeout)s, TRUE);

-- name: vector_version
SELECT extversion FROM pg_extension WHERE extname = 'vector';

-- name: vector_available
SELECT default_version FROM pg_available_extensions WHERE name = 'vector';

-- name: server_version
SELECT current_setting('server_version_num')::integer AS version;

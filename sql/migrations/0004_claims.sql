-- How often an entry was claimed since it was entered. `attempts` counts charged failures and `crashes` lost leases;
-- a row that wave after wave gives back, charging nobody, would show in neither.
ALTER TABLE embed_assets.semantic_outbox ADD COLUMN claims integer NOT NULL DEFAULT 0;
ALTER TABLE embed_assets.semantic_outbox_log ADD COLUMN claims integer NOT NULL DEFAULT 0;

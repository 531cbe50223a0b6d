-- The built-in jobs table, made in your schema when you have none of your own.
-- external_id is what files call a posting; duplicate_of holds the id of the original.
-- content_hash is the revision: it changes exactly when title, company or description do. A part is
-- its md5 or, when NULL, a dash: fixed widths and no dash in hex, so that no two contents join alike.
CREATE TABLE IF NOT EXISTS jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    external_id text UNIQUE,
    title text,
    company text,
    company_slug text,
    description text,
    posted_at timestamptz,
    created_at timestamptz DEFAULT now(),
    closed_at timestamptz,
    duplicate_of bigint,
    is_tech boolean,
    is_private boolean NOT NULL DEFAULT FALSE,
    content_hash text GENERATED ALWAYS AS (
        md5(coalesce(md5(title), '-') || coalesce(md5(company), '-') || coalesce(md5(description), '-'))
    ) STORED
);

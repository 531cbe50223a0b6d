"""The built-in corpus `jobs`: job postings in HTML, freshest first."""

from embed_assets.corpus import Html, Similar, TableCorpus

jobs = TableCorpus(
    kind="jobs",
    table="jobs",
    key="id",
    chunks="job_semantic_chunks",
    text=Html("description"),
    prefix="passage: {title} at {company}. ",
    revision="content_hash",
    fresh_at="coalesce(posted_at, created_at)",
    order="freshest",
    indexable="closed_at IS NULL AND duplicate_of IS NULL AND is_tech IS TRUE",
    legacy_embedding="semantic_embedding",
    similar=Similar(
        k=20,
        where="other.closed_at IS NULL AND NOT other.is_private "
        "AND other.company_slug IS DISTINCT FROM self.company_slug",
    ),
)

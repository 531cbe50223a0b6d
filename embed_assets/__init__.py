"""Keeps pgvector embeddings in step with Postgres tables, incrementally, run and watched from Dagster."""

from embed_assets.corpus import Html, Plain, Similar, TableCorpus

__all__ = ["Html", "Plain", "Similar", "TableCorpus"]

"""Keeps pgvector embeddings in step with Postgres tables, incrementally, run and watched from Dagster."""

from embed_assets.corpus import EscapedHtml, Hooks, Html, Markdown, Plain, Similar, TableCorpus

__all__ = ["EscapedHtml", "Hooks", "Html", "Markdown", "Plain", "Similar", "TableCorpus"]

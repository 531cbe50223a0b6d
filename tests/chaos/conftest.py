"""The fixtures of the database tests, for the tests that kill processes."""

from postgres.conftest import embedder, jobs_table, kind, make_kind, other

__all__ = ["embedder", "jobs_table", "kind", "make_kind", "other"]

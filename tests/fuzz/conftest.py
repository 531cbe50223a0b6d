"""The fixtures of the database tests, for the hostile texts that go through a whole drain."""

from postgres.conftest import embedder, make_kind

__all__ = ["embedder", "make_kind"]

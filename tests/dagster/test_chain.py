"""The five assets of a drain, in order, on a real Postgres."""

from __future__ import annotations

from tests.dagster.project import Project, stages

CHAIN = ["semantic_outbox", "claimed_waves", "chunk_embeddings", "semantic_chunks", "similar_invalidations"]


def test_a_drain_materialises_the_five_tables_in_order(project: Project) -> None:
    project.put("one", "two", "three")
    result = project.drain()
    assert result.success, [e.event_specific_data for e in result.all_events if e.is_failure]
    assert stages(result) == CHAIN
    assert project.fresh == 3
    assert project.open_waves == 0

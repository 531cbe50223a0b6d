"""What the state machine found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from model.world import World

from embed_assets import pipeline
from embed_assets.stop import Stop


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    made = World(database_url)
    made.reset()
    yield made
    made.close()


def drain(world: World, *, reconcile: bool = False) -> None:
    world.scan_late(reconcile=reconcile)
    worker = world.workers[0]
    worker.enqueuer.enqueue(scan=True)
    while wave := worker.outbox.claim("run", 6):
        pipeline.stage(worker.ports, wave, Stop())
        worker.chunks.write(wave)


@pytest.mark.parametrize("what", ["close", "delete"])
def test_chunks_that_pruning_left_of_a_row_that_left_search_are_cleared(world: World, what: str) -> None:
    """The reconciler took the short row's stamp, by which alone the scan would have found it."""
    world.change(world.db, "1", "edit", ("a", "b"), False)
    drain(world)
    world.change(world.db, "1", what, (), True)
    world.db.execute("DELETE FROM embed_assets.job_semantic_chunks WHERE chunk_index = 0")
    drain(world, reconcile=True)
    assert not world.look().chunks

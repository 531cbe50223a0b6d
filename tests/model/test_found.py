"""What the state machine found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from model.laws import status_counts
from model.world import World

from embed_assets import pipeline
from embed_assets.errors import InputRejected
from embed_assets.models import Failure
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


def test_a_dismissed_row_that_is_deleted_and_announced_is_due(world: World) -> None:
    """The status looked into the feed for rows that are there, not for stamps that are left over."""
    world.change(world.db, "1", "edit", ("a",), False)
    drain(world)
    world.announce(world.db, "1", False)
    world.workers[0].enqueuer.enqueue()
    wave = world.workers[0].outbox.claim("run", 1)
    assert wave is not None
    world.workers[0].outbox.fail(wave, [Failure("1", InputRejected("refused"))])
    world.operator.dismiss()
    world.change(world.db, "1", "delete", (), True)
    world.announce(world.db, "1", False)
    counts = world.workers[0].outbox.status("").counts
    assert dict(counts) == status_counts(world.look()) == {"due": 1}

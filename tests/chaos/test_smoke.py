"""Three faults of the long chaos run (`make chaos`), in the main run: the driver itself is held to work."""

from __future__ import annotations

import pytest

from tests.chaos.chaos import Outcome, run


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(
        ["kill drain", "stop postgres at once", "kill embedding"],
        seed=1,
        pause=(1.0, 2.0),
        drains=2,
        rows=40,
        patience=60,
    )


@pytest.mark.ids("Q19")
def test_drains_database_and_endpoint_are_killed_and_the_facts_equal_the_source(outcome: Outcome) -> None:
    outcome.print()
    assert outcome.failures == []
    assert [fault.kind for fault in outcome.faults] == ["kill drain", "stop postgres at once", "kill embedding"]
    assert outcome.facts.at_rest
    assert outcome.facts.chunks > 0

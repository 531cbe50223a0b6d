"""The queue's protocol as a state machine, and the proof that the machine notices every guard that is missing.

`MODEL_STEPS`, `MODEL_SEED` and `MODEL_MUTANTS=all` in the environment make the long run (`make model`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from model.judged import Tally
from model.machine import QueueMachine
from model.mutants import MUTANTS, QUICK, Mutant
from model.world import World
from psycopg import sql
from psycopg.conninfo import make_conninfo

TEMPLATE = "template_migrated"
STEPS = int(os.environ.get("MODEL_STEPS", "5000"))
SEED = int(os.environ.get("MODEL_SEED", "1"))
PART = 5_000
MUTANT_SEED, MUTANT_STEPS = 1, 5_000
EXAMPLES, STEPS_OF_AN_EXAMPLE = 12, 50
CHOSEN = [m for m in MUTANTS if m.name in QUICK or os.environ.get("MODEL_MUTANTS") == "all"]

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def world(server_url: str) -> Iterator[World]:
    """One database for all runs of this module; each example begins with emptied tables."""
    database = f"model_{uuid.uuid4().hex[:12]}"
    name = sql.Identifier(database)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(name, sql.Identifier(TEMPLATE)))
        connection.execute("SELECT pg_advisory_unlock(1)")
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
        made = World(make_conninfo(server_url, dbname=database))
        yield made
        made.close()
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def run(world: World, number: int, steps: int, tally: Tally, *phases: Phase) -> None:
    """Batches of examples until so many steps are made. Raises what breaks a law.

    The database repeats a sequence almost always; that it once chose another row is no law broken.
    """
    while tally.steps < steps:
        machine = seed(number)(type("Queue", (QueueMachine,), {"world": world, "tally": tally}))
        try:
            run_state_machine_as_test(machine, settings=_settings(*phases))
        except Flaky:
            if tally.broken_at is not None:
                raise
        number += 1_000


def _settings(*phases: Phase) -> settings:
    return settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS_OF_AN_EXAMPLE,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(max(1, STEPS // PART)))
def test_no_sequence_of_events_breaks_a_law(world: World, part: int, record_property: Record) -> None:
    tally = Tally()
    record_property("seed", SEED + part)
    run(world, SEED + part, min(STEPS, PART), tally, Phase.generate, Phase.shrink)
    record_property("steps", tally.steps)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_every_missing_guard_is_noticed(world: World, mutant: Mutant, record_property: Record) -> None:
    tally = Tally()
    with mutant.applied(), suppress(Exception):
        run(world, MUTANT_SEED, MUTANT_STEPS, tally, Phase.generate)
    assert tally.broken_at is not None, f"{tally.steps} steps and nobody noticed: {mutant.name}"
    record_property("noticed at step", tally.broken_at)
    record_property("as", tally.broken.splitlines()[0][:110])

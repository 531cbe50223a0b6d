"""The stages and the loop over them, on ports in memory: no database, no network, no Dagster."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes import HashEmbedder
from unit.ports import MemoryChunkStore, MemorySystem

from embed_assets import pipeline
from embed_assets.errors import (
    AnswerContract,
    Cancelled,
    ClassifiedError,
    CorruptRow,
    DatabaseTrouble,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    InputTooLong,
    LeaseLost,
    RowRejected,
    TooLarge,
)
from embed_assets.models import Counts, Enqueued, Wave
from embed_assets.pipeline import FRUITLESS_WAVES, Limits
from embed_assets.stop import Stop


@pytest.fixture
def system() -> MemorySystem:
    return MemorySystem()


def fill(system: MemorySystem, *ids: str) -> None:
    for source_id in ids or ("a", "b", "c", "d", "e"):
        system.put(source_id, f"text of {source_id}")


def drain(system: MemorySystem, *, stop: Stop | None = None, limits: Limits | None = None, **options: Any) -> Counts:
    return pipeline.drain(system.ports, "run", limits=limits or Limits(rows=2), stop=stop or Stop(), **options)[1]


def claimed(system: MemorySystem, limit: int = 10) -> Wave:
    system.ports.enqueuer.enqueue(scan=True)
    wave = system.ports.outbox.claim("run", limit)
    assert wave is not None
    return wave


def states(system: MemorySystem) -> dict[str, tuple[str, int]]:
    return {entry.source_id: (entry.status, entry.attempts) for entry in system.memory.entries.values()}


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


@pytest.mark.ids("A-73")
def test_a_drain_runs_without_a_database_or_a_network(system: MemorySystem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "socket", raising(AssertionError("a socket was opened")))
    fill(system)
    counts = drain(system)
    assert (counts.claimed, counts.indexed, counts.texts, counts.failed) == (5, 5, 5, 0)
    assert system.stamped() == ["a", "b", "c", "d", "e"]


@pytest.mark.ids("A-73")
def test_the_stages_import_neither_dagster_nor_a_driver():
    program = (
        "import embed_assets.pipeline, sys; print(sorted({'dagster', 'psycopg', 'sqlalchemy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- the loop


@pytest.mark.ids("A-01")
def test_a_drain_enqueues_first_then_claims_until_nothing_is_due(system: MemorySystem):
    fill(system)
    seen: list[Any] = []
    counts = drain(
        system,
        on_enqueued=lambda enqueued: seen.append(enqueued.created),
        report=lambda wave, counts, total: seen.append((len(wave.entries), counts.indexed, total.indexed)),
    )
    assert seen == [5, (2, 2, 2), (2, 2, 4), (1, 1, 5)]
    assert counts.claimed == 5


@pytest.mark.ids("A-72")
@pytest.mark.parametrize(
    ("limits", "done"),
    [
        (Limits(rows=2), 5),
        (Limits(rows=2, waves=1), 2),
        (Limits(rows=2, rows_in_all=3), 3),
        (Limits(rows=10, rows_in_all=3), 3),
        (Limits(rows=2, waves=0, rows_in_all=0), 5),
    ],
)
def test_a_run_stops_at_its_limits_and_the_last_claim_shrinks_to_them(system: MemorySystem, limits: Limits, done: int):
    fill(system)
    assert drain(system, limits=limits).indexed == done
    assert [status for status, _ in states(system).values()] == ["pending"] * (5 - done)


def test_a_drain_of_rows_that_always_come_back_ends_and_says_so(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    fill(system)
    keep = system.ports.chunks.write

    def lose_the_plan(wave: Wave, **options: Any) -> Counts:
        system.memory.plans.pop(wave.wave_id, None)
        return keep(wave, **options)

    monkeypatch.setattr(system.ports.chunks, "write", lose_the_plan)
    assert drain(system).claimed == 2 * FRUITLESS_WAVES
    assert "20 waves in a row settled nothing" in caplog.text
    assert [status for status, _ in states(system).values()] == ["pending"] * 5


def test_an_empty_claim_is_not_believed_while_a_count_says_otherwise(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch
):
    fill(system, "a", "b")
    system.memory.locked = {"a", "b"}
    waits: list[float] = []

    def unlock(seconds: float) -> None:
        waits.append(seconds)
        system.memory.locked = set()

    monkeypatch.setattr(time, "sleep", unlock)
    assert drain(system).indexed == 2
    assert waits


def test_a_drain_that_waits_for_locked_rows_hears_a_cancellation(system: MemorySystem):
    fill(system, "a")
    system.memory.locked = {"a"}
    stop = Stop()
    stop.cancel()
    with pytest.raises(Cancelled):
        drain(system, stop=stop)


@pytest.mark.ids("A-34")
def test_what_fails_in_a_drain_is_left_to_the_next(system: MemorySystem):
    fill(system, "a", "poison", "z")
    system.embedder.reject = lambda text: AnswerContract("zero") if "poison" in text else None
    counts = drain(system, report=lambda *_: system.pass_time(60))
    assert (counts.indexed, counts.failed) == (2, 1)
    assert states(system) == {"poison": ("retry_wait", 1)}


@pytest.mark.ids("A-36")
def test_every_claimed_row_is_in_exactly_one_counter(system: MemorySystem):
    fill(system, "stays", "hidden", "gone", "superseded")
    drain(system)
    system.put("hidden", "x", good=False)
    system.remove("gone")
    system.say("superseded")
    for word, error in (("later", AnswerContract("no")), ("never", InputRejected("no"))):
        system.put(word, word)
        before, system.embedder.reject = system.embedder.reject, lambda text, w=word, e=error: e if w in text else None
        first = system.embedder.reject
        system.embedder.reject = lambda text, f=first, b=before: f(text) or b(text)
    system.put("new", "new")
    counts = drain(system, limits=Limits(rows=100))
    parts = {name: getattr(counts, name) for name in ("indexed", "removed", "gone", "superseded", "failed", "dead")}
    assert parts == dict.fromkeys(parts, 1)
    assert counts.claimed == sum(parts.values()) + counts.lost == 6


# --- one wave


def test_work_is_said_to_begin_before_the_first_row_is_loaded(system: MemorySystem, monkeypatch: pytest.MonkeyPatch):
    fill(system, "a")
    wave = claimed(system)
    real = MemoryChunkStore.slices

    def slices(store: MemoryChunkStore, wave: Wave) -> Any:
        assert system.memory.waves[wave.wave_id].started
        return real(store, wave)

    monkeypatch.setattr(MemoryChunkStore, "slices", slices)
    assert pipeline.work(system.ports, wave, Limits(), Stop()).indexed == 1


def test_a_wave_that_is_lost_before_it_began_does_nothing(system: MemorySystem):
    fill(system, "a")
    wave = claimed(system)
    system.pass_time(1000)
    counts = pipeline.work(system.ports, wave, Limits(), Stop())
    assert (counts.lost, counts.indexed, system.embedder.requests) == (1, 0, 0)


@pytest.mark.ids("B-21", "B-25")
def test_a_lease_that_is_lost_during_embedding_ends_the_work_and_writes_nothing(system: MemorySystem):
    fill(system)
    system.embedder.request_items = 1
    wave = claimed(system)

    def lose(_: Sequence[str]) -> None:
        if system.embedder.requests == 2:
            system.ports.keeper.held[wave.wave_id].lose()  # type: ignore[attr-defined]

    system.embedder.before = lose
    counts = pipeline.work(system.ports, wave, Limits(), Stop())
    assert (counts.lost, counts.indexed, counts.failed) == (5, 0, 0)
    assert (system.embedder.requests, system.stamped()) == (2, [])
    assert set(states(system).values()) == {("leased", 0)}  # who holds it now decides


@pytest.mark.parametrize(
    ("error", "raised", "outcome"),
    [
        (None, None, "written"),
        (Cancelled("now"), Cancelled, "released"),
        (LeaseLost("gone"), None, None),
        (DatabaseTrouble("again and again"), DatabaseTrouble, "released"),
        (EndpointTrouble("429", error_class=ErrorClass.RATE_LIMITED), EndpointTrouble, "released"),
        (KeyError("a bug"), KeyError, None),
        (KeyboardInterrupt(), KeyboardInterrupt, "released"),
        (SystemExit(1), SystemExit, "released"),
    ],
)
def test_however_a_wave_ends_its_heartbeat_ends_and_only_what_is_not_to_lapse_is_released(
    system: MemorySystem, error: BaseException | None, raised: type[BaseException] | None, outcome: str | None
):
    fill(system, "a")
    wave = claimed(system)
    if error:
        system.embedder.before = raising(error)
    if raised:
        with pytest.raises(raised):
            pipeline.work(system.ports, wave, Limits(), Stop())
    else:
        pipeline.work(system.ports, wave, Limits(), Stop())
    assert system.ports.keeper.held == {}  # type: ignore[attr-defined]
    assert system.memory.waves[wave.wave_id].outcome == outcome
    assert all(entry.attempts == 0 for entry in system.memory.entries.values())


@pytest.mark.ids("A-31")
@pytest.mark.parametrize("error", [RuntimeError("x"), EndpointTrouble("x", error_class=ErrorClass.REFUSED)])
def test_the_state_of_the_scope_decides_and_not_the_error_that_came_of_it(system: MemorySystem, error: Exception):
    fill(system, "a")
    scope = Stop(seconds=0.05)
    wave = claimed(system)

    def late(_: Sequence[str]) -> None:
        time.sleep(0.06)
        raise error

    system.embedder.before = late
    counts = pipeline.guarded(system.ports, wave, scope, lambda: pipeline.stage(system.ports, wave, scope))
    assert (counts.lost, counts.failed) == (1, 0)
    assert system.memory.endpoint == "ok"
    assert system.memory.entries["a"].timeouts == 1


@pytest.mark.ids("A-28")
def test_a_wave_has_a_budget_of_its_own_and_none_when_it_is_zero(system: MemorySystem):
    fill(system, "a")
    system.embedder.before = lambda texts: time.sleep(0.03)
    assert pipeline.work(system.ports, claimed(system), Limits(wave_seconds=0.01), Stop()).lost == 1
    assert pipeline.work(system.ports, claimed(system), Limits(wave_seconds=0), Stop()).indexed == 1


@pytest.mark.ids("A-35")
def test_counters_that_cannot_be_kept_hide_no_error_and_stop_no_wave(
    system: MemorySystem, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    fill(system, "a")
    monkeypatch.setattr(system.ports.outbox, "staged", raising(OSError("no database")))
    assert pipeline.work(system.ports, claimed(system), Limits(), Stop()).indexed == 1
    assert "the wave's counters could not be kept" in caplog.text
    fill(system, "b")
    system.embedder.before = raising(KeyError("the real one"))
    with pytest.raises(KeyError, match="the real one"):
        pipeline.work(system.ports, claimed(system), Limits(), Stop())


def test_what_staging_cost_is_kept_with_the_wave_also_when_it_was_cut_short(system: MemorySystem):
    fill(system)
    system.embedder.request_items = 1
    stop = Stop()
    system.embedder.before = lambda texts: stop.cancel() if system.embedder.requests == 2 else None
    wave = claimed(system)
    with pytest.raises(Cancelled):
        pipeline.work(system.ports, wave, Limits(), stop)
    assert system.memory.waves[wave.wave_id].texts == 1
    assert len(system.memory.ledger) == 1


# --- staging


def test_each_slice_is_planned_and_bought_before_the_next_is_loaded(system: MemorySystem):
    fill(system)
    pipeline.work(system.ports, claimed(system), Limits(), Stop())
    assert system.embedder.requests == 3  # slices of two


def test_each_missing_text_is_asked_for_once_and_the_counters_tell_bought_from_reused(system: MemorySystem):
    for source_id in ("a", "b", "c"):
        system.put(source_id, "same")
    counts = drain(system, limits=Limits(rows=2))
    assert (counts.texts, counts.chunks, counts.reused) == (1, 3, 1)  # two of one slice share the purchase
    assert system.embedder.texts == ["same"]
    assert counts.tokens == 1


@pytest.mark.ids("A-23", "A-26")
@pytest.mark.parametrize(
    ("error", "status"), [(RowRejected("a cast"), ("retry_wait", 1)), (CorruptRow("a page"), ("dead", 1))]
)
@pytest.mark.parametrize("where", ["slices", "load"])
def test_a_row_that_cannot_be_read_is_found_by_halves_and_the_others_are_written(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch, error: ClassifiedError, status: tuple[str, int], where: str
):
    fill(system, *"abcdefghijklmnop")
    store = MemoryChunkStore(system.memory, slice_rows=16)
    asked: list[int] = []

    def load(wave: Wave, ids: Sequence[str]) -> Any:
        asked.append(len(ids))
        if "k" in ids:
            raise error
        return MemoryChunkStore.load(store, wave, ids)

    monkeypatch.setattr(store, "load", load)
    if where == "slices":
        monkeypatch.setattr(store, "slices", raising(error))
    system.ports = replace(system.ports, chunks=store)
    counts = pipeline.work(system.ports, claimed(system, 100), Limits(), Stop())
    assert (counts.indexed, counts.failed + counts.dead) == (15, 1)
    assert states(system) == {"k": status}
    assert len(asked) <= 10


def test_an_error_of_loading_that_is_no_rows_fault_ends_the_wave(system: MemorySystem, monkeypatch: pytest.MonkeyPatch):
    fill(system)
    monkeypatch.setattr(system.ports.chunks, "load", raising(DatabaseTrouble("no connection")))
    with pytest.raises(DatabaseTrouble):
        pipeline.work(system.ports, claimed(system), Limits(), Stop())
    assert set(states(system).values()) == {("pending", 0)}


def test_a_database_in_trouble_ends_the_drain_instead_of_being_asked_for_ever(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch
):
    fill(system)
    monkeypatch.setattr(system.ports.chunks, "write", raising(DatabaseTrouble("no connection")))
    with pytest.raises(DatabaseTrouble):
        pipeline.drain(system.ports, "run", limits=Limits(), stop=Stop())
    assert set(states(system).values()) == {("pending", 0)}


class Corpus:
    """The declaration, of which one row is too large from a chunk size on."""

    max_chars = 2000

    def __init__(self, system: MemorySystem, source_id: str, below: int) -> None:
        self._real, self._source_id, self._below = system.ports.corpus, source_id, below

    def plan(self, row: Any, *, max_chars: int | None = None) -> Any:
        if row.source_id == self._source_id and (max_chars or self.max_chars) < self._below:
            raise TooLarge("too many chunks")
        return self._real.plan(row, max_chars=max_chars)


def test_a_row_that_is_too_large_is_dead_and_the_others_are_written(system: MemorySystem):
    fill(system)
    ports = replace(system.ports, corpus=Corpus(system, "b", 10_000))
    counts = pipeline.work(ports, claimed(system), Limits(), Stop())
    assert (counts.indexed, counts.dead) == (4, 1)
    assert system.memory.entries["b"].error_class == "too_large"
    assert system.memory.entries["b"].revision_known


def test_a_row_that_becomes_too_large_as_its_chunks_get_smaller_is_dead_and_the_others_are_written(
    system: MemorySystem,
):
    fill(system)
    system.embedder.reject = lambda text: InputTooLong("too long") if text == "text of b" else None
    ports = replace(system.ports, corpus=Corpus(system, "b", 400))
    counts = pipeline.work(ports, claimed(system), Limits(), Stop())
    assert (counts.indexed, counts.dead) == (4, 1)
    assert system.memory.entries["b"].error_class == "too_large"


@pytest.mark.ids("C-35", "E11")
def test_a_text_that_is_too_long_halves_the_chunks_of_its_row_until_it_fits(system: MemorySystem):
    system.put("long", "word " * 350)
    system.put("short", "word " * 70)
    system.embedder.reject = lambda text: InputTooLong("over 500") if len(text) > 500 else None
    assert drain(system).indexed == 2
    bodies = system.bodies("long")
    assert 250 < max(map(len, bodies)) <= 500
    assert sum(body.count("word") for body in bodies) == 350
    assert len(system.bodies("short")) == 1


@pytest.mark.ids("C-35")
def test_a_text_that_is_too_long_at_any_size_is_dead_after_a_few_requests(system: MemorySystem):
    system.put("a", "word " * 350)
    system.embedder.reject = lambda text: InputTooLong("always")
    counts = drain(system)
    assert (counts.dead, counts.indexed) == (1, 0)
    assert system.embedder.requests <= 6


def test_a_row_with_one_text_too_long_and_one_rejected_fails_for_the_rejected_one(system: MemorySystem):
    system.put("a", "long " * 300 + "\n\n" + "bad " * 300)
    errors = {"long": InputTooLong("long"), "bad": InputRejected("bad", code="bad_words")}
    system.embedder.reject = lambda text: errors[text.split()[0]]
    assert drain(system).dead == 1
    assert system.embedder.requests == 1


@pytest.mark.ids("B-36", "Q22")
def test_no_chunk_is_written_before_all_texts_of_the_wave_are_had(system: MemorySystem):
    fill(system)
    drain(system)
    before = {source_id: system.vectors(source_id) for source_id in "abcde"}
    for source_id in "abcde":
        system.put(source_id, f"new {source_id}")
    system.embedder.before = raising(EndpointTrouble("down", error_class=ErrorClass.UNAVAILABLE))
    wave = claimed(system)
    requests = system.embedder.requests
    system.embedder.before = lambda texts: (
        raising(EndpointTrouble("down", error_class=ErrorClass.UNAVAILABLE))()
        if system.embedder.requests == requests + 3
        else None
    )
    with pytest.raises(EndpointTrouble):
        pipeline.work(system.ports, wave, Limits(), Stop())
    assert {source_id: system.vectors(source_id) for source_id in "abcde"} == before


# --- writing


@pytest.mark.ids("A-25")
@pytest.mark.parametrize("guilty", [["a"], ["e"], ["b", "d"], ["a", "b", "c", "d", "e"]])
def test_halving_finds_every_guilty_row_and_closes_the_wave(system: MemorySystem, guilty: list[str]):
    fill(system)
    system.refuse(*guilty)
    wave = claimed(system)
    counts = pipeline.work(system.ports, wave, Limits(), Stop())
    assert (counts.indexed, counts.failed) == (5 - len(guilty), len(guilty))
    assert system.stamped() == sorted(set("abcde") - set(guilty))
    assert states(system) == dict.fromkeys(guilty, ("retry_wait", 1))
    assert system.memory.waves[wave.wave_id].outcome == "written"


def test_a_wave_without_a_guilty_row_is_written_by_one_transaction(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch
):
    fill(system)
    real, writes = system.ports.chunks.write, []

    def write(wave: Wave, **options: Any) -> Counts:
        writes.append(options.get("ids"))
        return real(wave, **options)

    monkeypatch.setattr(system.ports.chunks, "write", write)
    pipeline.work(system.ports, claimed(system), Limits(), Stop())
    assert writes == [None]


@pytest.mark.ids("A-30")
def test_a_cancellation_while_a_guilty_row_is_looked_for_charges_nobody(
    system: MemorySystem, monkeypatch: pytest.MonkeyPatch
):
    fill(system)
    system.refuse("e")
    stop, real = Stop(), system.ports.chunks.write

    def write(wave: Wave, **options: Any) -> Counts:
        counts = real(wave, **options)
        stop.cancel()
        return counts

    monkeypatch.setattr(system.ports.chunks, "write", write)
    with pytest.raises(Cancelled):
        pipeline.work(system.ports, claimed(system), Limits(), stop)
    assert system.stamped() == ["a", "b"]
    assert set(states(system).values()) == {("pending", 0)}


def test_an_enqueuer_that_is_skipped_stops_no_drain(system: MemorySystem, monkeypatch: pytest.MonkeyPatch):
    fill(system)
    system.ports.enqueuer.enqueue(scan=True)
    monkeypatch.setattr(system.ports.enqueuer, "enqueue", lambda **_: Enqueued(skipped=True))
    enqueued, counts = pipeline.drain(system.ports, "run", limits=Limits(), stop=Stop())
    assert (enqueued.skipped, counts.indexed) == (True, 5)


def test_the_hash_embedder_answers_as_an_embedder_does():
    embedder = HashEmbedder(request_items=2)
    embedder.reject = lambda text: InputRejected("no") if text == "b" else None
    results = list(embedder.embed(["a", "b", "c"], stop=Stop()))
    assert sorted(position for result in results for position in result.positions) == [0, 1, 2]
    assert embedder.requests == 2

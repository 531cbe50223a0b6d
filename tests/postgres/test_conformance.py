"""One protocol, asked of two systems: the ports in memory and the ports on Postgres behave alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from fakes import HashEmbedder
from postgres.support import Db, chunks, rows, value
from unit.ports import NOTES, SEEN, MemorySystem

from embed_assets import pipeline
from embed_assets.errors import (
    AnswerContract,
    Cancelled,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    LeaseLost,
)
from embed_assets.models import Counts, Enqueued, Failure, Wave
from embed_assets.pipeline import Limits
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

LIMITS = Limits(rows=3)


class PostgresSystem:
    """The real ports on the corpus `notes`, as the suite sees them."""

    def __init__(self, db: Db, kind: Kind, embedder: HashEmbedder) -> None:
        self.db, self.kind, self.embedder, self.ports = db, kind, embedder, kind.ports

    def put(self, source_id: str, text: str | None, *, good: bool = True) -> None:
        statement = (
            "INSERT INTO notes VALUES (%s, %s, %s) "
            "ON CONFLICT (note_id) DO UPDATE SET body = excluded.body, good = excluded.good"
        )
        self.db.execute(statement, (source_id, text, good))

    def remove(self, source_id: str) -> None:
        self.db.execute("DELETE FROM notes WHERE note_id = %s", (source_id,))

    def say(self, *ids: str, forced: bool = False) -> None:
        self.db.execute("SELECT embed_assets.enqueue('notes', %s::text[], forced => %s)", (list(ids), forced))

    def entry(self, source_id: str) -> dict[str, Any] | None:
        found = value(
            self.db, f"SELECT {', '.join(SEEN)} FROM embed_assets.semantic_outbox WHERE source_id = %s", source_id
        )
        return found and dict(zip(SEEN, found, strict=True))

    def bodies(self, source_id: str) -> list[str]:
        return chunks(self.db, source_id, "body", "notes_semantic_chunks", "note_id")

    def vectors(self, source_id: str) -> list[list[float]]:
        return chunks(self.db, source_id, "embedding::real[]", "notes_semantic_chunks", "note_id")

    def fresh(self, source_id: str) -> bool:
        source = self.kind.bound.source.as_string(self.db)
        statement = (
            f"SELECT s.revision IS NOT DISTINCT FROM n.revision FROM embed_assets.semantic_stamps s JOIN {source} AS n "
            f"USING (source_id) WHERE source_id = '{source_id}' AND n.indexable"
        )
        return bool(value(self.db, statement))

    def stamped(self) -> list[str]:
        return rows(self.db, "SELECT source_id FROM embed_assets.semantic_stamps ORDER BY 1")

    def outcomes(self, source_id: str) -> list[str]:
        statement = "SELECT outcome FROM embed_assets.semantic_outbox_log WHERE source_id = %s ORDER BY id"
        return rows(self.db, statement, source_id)

    def wave(self, wave: Wave) -> tuple[str | None, int, int, int]:
        statement = "SELECT outcome, indexed, failed, dead FROM embed_assets.claimed_waves WHERE wave_id = %s"
        return value(self.db, statement, wave.wave_id)  # type: ignore[no-any-return]

    def invalidated(self) -> list[str]:
        return rows(self.db, "SELECT source_id FROM embed_assets.similar_invalidations ORDER BY 1")

    def pass_time(self, seconds: float) -> None:
        for table, column in (("semantic_outbox", "next_attempt_at"), ("claimed_waves", "lease_until")):
            self.db.execute(f"UPDATE embed_assets.{table} SET {column} = {column} - interval '{seconds} s'".encode())

    def lose_plans(self) -> None:
        self.db.execute("TRUNCATE embed_assets.wave_chunks")

    def purge_ledger(self) -> None:
        self.db.execute("TRUNCATE embed_assets.chunk_embeddings")

    def refuse(self, *ids: str) -> None:
        self.db.execute(
            f"""
            CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF new.source_id = ANY('{{{",".join(ids)}}}') THEN RAISE 'refused'; END IF;
                RETURN new;
            END $$;
            CREATE OR REPLACE TRIGGER refused BEFORE INSERT ON embed_assets.semantic_outbox_log
            FOR EACH ROW WHEN (new.outcome <> 'dead') EXECUTE FUNCTION public.refuse();
            """.encode()
        )

    @property
    def endpoint_state(self) -> str:
        return value(self.db, "SELECT state FROM embed_assets.embedding_endpoints") or "ok"


System = MemorySystem | PostgresSystem


def postgres_system(request: pytest.FixtureRequest) -> PostgresSystem:
    db, make_kind = request.getfixturevalue("db"), request.getfixturevalue("make_kind")
    db.execute("CREATE TABLE notes (note_id text PRIMARY KEY, body text, good boolean)")
    embedder = HashEmbedder()
    return PostgresSystem(db, make_kind(NOTES, embedder=embedder), embedder)


@pytest.fixture(params=["memory", "postgres"])
def system(request: pytest.FixtureRequest) -> System:
    return MemorySystem() if request.param == "memory" else postgres_system(request)


def drain(system: System, *, scan: bool = True, stop: Stop | None = None, limits: Limits = LIMITS) -> Counts:
    return pipeline.drain(system.ports, f"run-{uuid4()}", limits=limits, stop=stop or Stop(), scan=scan)[1]


def enqueue(system: System, *, scan: bool = True) -> Enqueued:
    return system.ports.enqueuer.enqueue(scan=scan)


def claimed(system: System, limit: int = 10, *, run_id: str = "run") -> Wave:
    wave = system.ports.outbox.claim(run_id, limit)
    assert wave is not None
    return wave


def staged(system: System, limit: int = 10) -> Wave:
    wave = claimed(system, limit)
    pipeline.stage(system.ports, wave, Stop())
    return wave


def state(system: System, source_id: str, *names: str) -> tuple[Any, ...]:
    entry = system.entry(source_id)
    assert entry is not None
    return tuple(entry[name] for name in names)


def fail(system: System, wave: Wave, *ids: str, deterministic: bool = False) -> Counts:
    error = InputRejected("never") if deterministic else AnswerContract("not now")
    return system.ports.outbox.fail(wave, [Failure(source_id, error) for source_id in ids])


def reject(word: str, error: Exception) -> Callable[[str], Exception | None]:
    return lambda text: error if word in text else None


@pytest.mark.ids("A-73", "A-01")
def test_a_drain_embeds_what_is_new_logs_it_and_leaves_nothing(system: System):
    for number in range(7):
        system.put(f"n{number}", f"text {number}")
    counts = drain(system)
    assert (counts.claimed, counts.indexed, counts.texts) == (7, 7, 7)
    for number in range(7):
        assert system.bodies(f"n{number}") == [f"text {number}"]
        assert system.fresh(f"n{number}")
        assert system.entry(f"n{number}") is None
        assert system.outcomes(f"n{number}") == ["indexed"]
    assert system.invalidated() == system.stamped()
    assert (drain(system).claimed, len(system.embedder.texts)) == (0, 7)


@pytest.mark.ids("A-02", "A-10")
def test_a_row_is_enqueued_once_however_often_it_is_said_or_found(system: System):
    system.put("a", "text")
    system.put("hidden", "text", good=False)
    system.say("a", "a")
    assert enqueue(system).created == 1
    assert enqueue(system).created == 0
    system.say("a")
    assert enqueue(system).created == 0
    assert system.entry("hidden") is None


@pytest.mark.ids("A-15", "A-12")
def test_claims_are_disjoint_bounded_and_end_when_a_count_says_so(system: System):
    for number in range(5):
        system.put(f"n{number}", "text")
    enqueue(system)
    waves = [claimed(system, 2) for _ in range(3)]
    ids = [source_id for wave in waves for source_id in wave.source_ids]
    assert sorted(ids) == sorted(set(ids)) == [f"n{number}" for number in range(5)]
    assert [len(wave.entries) for wave in waves] == [2, 2, 1]
    assert all(wave.source_ids == sorted(wave.source_ids) for wave in waves)
    assert len({wave.token for wave in waves}) == 3
    assert system.ports.outbox.claim("run", 2) is None
    assert not system.ports.outbox.claimable()


@pytest.mark.ids("B-15", "B-16", "B-19")
def test_nothing_is_done_under_a_wave_that_expired_or_has_another_token(system: System):
    system.put("a", "text")
    enqueue(system)
    wave = staged(system)
    forged = replace(wave, token=uuid4())
    outbox, store = system.ports.outbox, system.ports.chunks
    steps: list[Callable[[Wave], Any]] = [
        outbox.start,
        store.write,
        lambda mine: store.plan(mine, []),
        lambda mine: fail(system, mine, "a"),
    ]
    for step in steps:
        with pytest.raises(LeaseLost):
            step(forged)
    assert outbox.release(forged) == Counts()
    system.pass_time(1000)
    for step in steps:
        with pytest.raises(LeaseLost):
            step(wave)
    assert state(system, "a", "status", "attempts") == ("leased", 0)
    assert system.bodies("a") == system.stamped() == []
    again = claimed(system)
    for step in steps:
        with pytest.raises(LeaseLost):
            step(wave)
    assert outbox.release(wave) == Counts()
    assert state(system, "a", "status") == ("leased",)
    assert system.ports.chunks.write(again).indexed == 0  # its plan was the old wave's


@pytest.mark.ids("A-33", "B-27", "B-12")
def test_a_failure_is_charged_waits_twice_as_long_each_time_and_the_third_kills(system: System):
    system.put("a", "text")
    enqueue(system)
    for attempt, seconds in ((1, 5), (2, 10)):
        wave = claimed(system)
        counts = fail(system, wave, "a", "nobody")
        assert (counts.failed, counts.dead) == (1, 0)
        assert state(system, "a", "status", "attempts", "error_class") == ("retry_wait", attempt, "contract")
        assert system.wave(wave)[2:] == (1, 0)
        system.pass_time(seconds * 0.7)
        assert system.ports.outbox.claim("run", 1) is None
        system.pass_time(seconds * 0.6)
    assert fail(system, claimed(system), "a").dead == 1
    assert state(system, "a", "status", "attempts") == ("dead", 3)
    assert system.outcomes("a") == ["dead"]
    system.pass_time(10_000)
    assert system.ports.outbox.claim("run", 1) is None


@pytest.mark.ids("B-29", "A-18")
def test_what_can_never_succeed_is_dead_at_once_and_comes_back_when_its_text_changes(system: System):
    system.put("a", "poison")
    system.embedder.reject = reject("poison", InputRejected("never"))
    assert drain(system).dead == 1
    assert state(system, "a", "status", "attempts", "error_class") == ("dead", 1, "input_rejected")
    assert drain(system).claimed == 0
    system.put("a", "cured")
    assert drain(system).indexed == 1
    assert system.outcomes("a") == ["dead", "indexed"]


@pytest.mark.ids("C-20")
def test_a_dead_row_that_is_gone_is_settled(system: System):
    system.put("a", "poison")
    system.embedder.reject = reject("poison", InputRejected("never"))
    drain(system)
    system.remove("a")
    assert drain(system).gone == 1
    assert (system.entry("a"), system.outcomes("a")) == (None, ["dead", "gone"])


def test_what_failed_is_not_tried_again_in_the_same_drain(system: System):
    for source_id in ("a", "b", "poison"):
        system.put(source_id, source_id)
    system.embedder.reject = reject("poison", AnswerContract("not now"))
    counts = drain(system, limits=Limits(rows=1))
    assert (counts.indexed, counts.failed) == (2, 1)
    assert state(system, "poison", "status", "attempts") == ("retry_wait", 1)
    assert (drain(system).claimed, state(system, "poison", "attempts")) == (0, (1,))
    system.pass_time(10)
    assert (drain(system).failed, state(system, "poison", "attempts")) == (1, (2,))


def test_a_release_charges_nobody_and_what_was_released_is_claimed_again_at_once(system: System):
    system.put("a", "text")
    enqueue(system)
    wave = claimed(system)
    system.ports.outbox.start(wave)
    assert system.ports.outbox.release(wave).lost == 1
    assert state(system, "a", "status", "attempts", "crashes", "timeouts") == ("pending", 0, 0, 0)
    assert system.wave(wave)[0] == "released"
    assert system.ports.outbox.release(wave) == Counts()
    assert claimed(system).source_ids == ["a"]


@pytest.mark.ids("A-17", "B-09", "B-10")
def test_a_lost_lease_is_a_crash_only_of_a_wave_that_had_started_and_the_third_kills(system: System):
    system.put("a", "text")
    enqueue(system)
    claimed(system)
    system.pass_time(1000)
    wave = claimed(system)
    assert state(system, "a", "crashes") == (0,)
    for crashes in (1, 2):
        system.ports.outbox.start(wave)
        system.pass_time(1000)
        wave = claimed(system)
        assert state(system, "a", "status", "attempts", "crashes") == ("leased", 0, crashes)
    system.ports.outbox.start(wave)
    system.pass_time(1000)
    assert system.ports.outbox.claim("run", 1) is None
    assert state(system, "a", "status", "crashes", "error_class") == ("dead", 3, "LEASE_ATTEMPTS_EXHAUSTED")
    assert system.outcomes("a") == ["dead"]


@pytest.mark.ids("Q14")
def test_a_suspect_is_claimed_alone_and_after_all_others(system: System):
    for source_id in ("a", "b"):
        system.put(source_id, "text")
    enqueue(system)
    for _ in range(2):
        wave = claimed(system)
        system.ports.outbox.start(wave)
        system.pass_time(1000)
    system.put("c", "text")
    enqueue(system)
    assert [claimed(system).source_ids for _ in range(3)] == [["c"], ["a"], ["b"]]


@pytest.mark.ids("A-28")
def test_a_wave_that_timed_out_with_nothing_staged_marks_its_rows_and_a_suspect_that_does_so_alone_is_dead(
    system: System,
):
    for source_id in ("a", "b"):
        system.put(source_id, "text")
    enqueue(system)
    for timeouts in (1, 2):
        assert system.ports.outbox.release(claimed(system), timed_out=True).lost == 2
        assert state(system, "a", "status", "attempts", "timeouts") == ("pending", 0, timeouts)
    alone = claimed(system)
    assert alone.source_ids == ["a"]
    assert system.ports.outbox.release(alone, timed_out=True).dead == 1
    assert state(system, "a", "status", "attempts", "error_class") == ("dead", 0, "timeout")


@pytest.mark.ids("A-28")
def test_a_wave_that_timed_out_after_staging_something_marks_nobody(system: System):
    system.put("a", "text")
    enqueue(system)
    wave = staged(system)
    system.ports.outbox.release(wave, timed_out=True)
    assert state(system, "a", "status", "timeouts", "error_class") == ("pending", 0, None)


@pytest.mark.ids("A-70", "Q09")
def test_a_change_during_the_wave_puts_the_entry_back_with_the_stamp_of_what_was_loaded(system: System):
    system.put("a", "old")
    enqueue(system)
    wave = staged(system)
    system.put("a", "new")
    counts = system.ports.chunks.write(wave)
    assert (counts.indexed, counts.back) == (1, 1)
    assert (system.bodies("a"), system.stamped(), system.fresh("a")) == (["old"], ["a"], False)
    assert state(system, "a", "status", "attempts") == ("pending", 0)
    assert drain(system, scan=False).indexed == 1
    assert (system.bodies("a"), system.fresh("a")) == (["new"], True)


@pytest.mark.ids("A-70")
@pytest.mark.parametrize("meanwhile", ["hidden", "removed"])
def test_a_row_that_left_search_during_the_wave_is_back_and_cleared_next(system: System, meanwhile: str):
    system.put("a", "text")
    enqueue(system)
    wave = staged(system)
    if meanwhile == "hidden":
        system.put("a", "text", good=False)
    else:
        system.remove("a")
    assert system.ports.chunks.write(wave).back == 1
    counts = drain(system, scan=False)
    assert (counts.removed, counts.gone) == ((1, 0) if meanwhile == "hidden" else (0, 1))
    assert (system.bodies("a"), system.stamped(), system.entry("a")) == ([], [], None)


def test_a_row_that_came_back_while_it_was_cleared_is_embedded_next(system: System):
    system.put("a", "text")
    drain(system)
    system.put("a", "text", good=False)
    enqueue(system)
    wave = staged(system)
    system.put("a", "text")
    counts = system.ports.chunks.write(wave)
    assert (counts.removed, counts.back) == (1, 1)
    assert drain(system, scan=False).indexed == 1
    assert (system.bodies("a"), system.fresh("a")) == (["text"], True)


@pytest.mark.ids("Q09", "C-66")
@pytest.mark.parametrize("forced", [False, True])
def test_a_request_during_the_wave_is_served_by_another(system: System, forced: bool):
    system.put("a", "text")
    enqueue(system)
    wave = staged(system)
    system.say("a", forced=forced)
    enqueue(system, scan=False)
    system.ports.chunks.write(wave)
    assert state(system, "a", "status", "forced") == ("pending", forced)
    counts = drain(system, scan=False)
    assert (counts.indexed, counts.superseded) == ((1, 0) if forced else (0, 1))
    assert len(system.embedder.texts) == 1 + forced
    assert system.entry("a") is None


def test_a_failure_of_a_row_that_was_requested_meanwhile_is_old_news(system: System):
    system.put("a", "text")
    enqueue(system)
    wave = staged(system)
    system.say("a")
    enqueue(system, scan=False)
    assert fail(system, wave, "a") == Counts(back=1)
    assert state(system, "a", "status", "attempts", "error_class") == ("pending", 0, None)


@pytest.mark.ids("C-26")
def test_a_forced_row_is_bought_again_and_only_what_was_bought_since_counts(system: System):
    system.put("a", "text")
    drain(system)
    system.say("a", forced=True)
    enqueue(system, scan=False)
    wave = staged(system)
    assert len(system.embedder.texts) == 2
    system.purge_ledger()
    assert system.ports.chunks.write(wave).indexed == 0
    assert state(system, "a", "status", "forced") == ("pending", True)
    assert drain(system, scan=False).indexed == 1
    assert len(system.embedder.texts) == 3


@pytest.mark.ids("A-39", "T18")
@pytest.mark.parametrize("text", [None, "", " \n "])
def test_a_row_without_text_is_done_and_has_no_chunk(system: System, text: str | None):
    system.put("a", "text")
    drain(system)
    system.put("a", text)
    assert drain(system).indexed == 1
    assert (system.bodies("a"), system.fresh("a"), len(system.embedder.texts)) == ([], True, 1)
    assert drain(system).claimed == 0


@pytest.mark.ids("A-08", "A-22")
def test_a_row_that_left_search_loses_its_chunks_and_stamp_and_asks_no_embedder(system: System):
    for source_id in ("a", "b", "stays"):
        system.put(source_id, source_id)
    drain(system)
    requests = system.embedder.requests
    system.put("a", "a", good=False)
    system.remove("b")
    counts = drain(system)
    assert (counts.removed, counts.gone, counts.indexed) == (1, 1, 0)
    assert system.stamped() == ["stays"]
    assert (system.bodies("a"), system.bodies("b"), system.bodies("stays")) == ([], [], ["stays"])
    assert (system.outcomes("a")[-1], system.outcomes("b")[-1]) == ("removed", "gone")
    assert system.embedder.requests == requests
    assert drain(system).claimed == 0


def test_a_row_that_is_what_its_stamp_says_is_superseded(system: System):
    system.put("a", "text")
    drain(system)
    system.say("a")
    assert drain(system, scan=False).superseded == 1
    assert system.outcomes("a") == ["indexed", "superseded"]
    assert len(system.embedder.texts) == 1


@pytest.mark.ids("A-38", "Q25")
def test_a_shorter_text_leaves_no_old_chunk_and_a_moved_one_keeps_its_vector(system: System):
    paragraph = {word: " ".join([word] * 300) for word in ("alpha", "bravo", "delta")}
    system.put("a", "\n\n".join(paragraph.values()))
    drain(system)
    before = system.vectors("a")
    system.purge_ledger()
    system.put("a", "\n\n".join([paragraph["delta"], paragraph["alpha"]]))
    assert drain(system).texts == 0
    assert system.bodies("a") == [paragraph["delta"], paragraph["alpha"]]
    assert system.vectors("a") == [before[2], before[0]]


def test_a_text_is_bought_once_for_all_rows_that_have_it(system: System):
    for source_id in ("a", "b", "c", "d"):
        system.put(source_id, "same")
    assert drain(system).texts == 1
    system.purge_ledger()
    system.put("e", "same")
    assert drain(system).texts == 0
    assert system.vectors("e") == system.vectors("a")


def test_a_lost_plan_puts_its_rows_back_and_changes_nothing(system: System):
    system.put("a", "old")
    drain(system)
    system.put("a", "new")
    enqueue(system)
    wave = staged(system)
    system.lose_plans()
    assert system.ports.chunks.write(wave) == Counts()
    assert (system.wave(wave)[0], system.bodies("a")) == ("written", ["old"])
    assert state(system, "a", "status", "attempts", "crashes") == ("pending", 0, 0)


def test_a_purged_vector_leaves_its_row_out_whole(system: System):
    system.put("a", "old")
    drain(system)
    system.put("a", "new")
    system.put("b", "old")  # its vector is in a's chunk
    enqueue(system)
    wave = staged(system)
    system.purge_ledger()
    counts = system.ports.chunks.write(wave)
    assert (counts.indexed, system.bodies("a"), system.bodies("b")) == (1, ["old"], ["old"])
    assert state(system, "a", "status", "attempts") == ("pending", 0)


@pytest.mark.ids("A-25", "Q11")
def test_a_row_that_cannot_be_written_is_charged_alone_and_the_others_are_written(system: System):
    for number in range(5):
        system.put(f"n{number}", f"text {number}")
    system.refuse("n1")
    enqueue(system)
    wave = staged(system)
    counts = pipeline.write(system.ports, wave, Stop())
    assert (counts.indexed, counts.failed, counts.dead) == (4, 1, 0)
    assert system.stamped() == ["n0", "n2", "n3", "n4"]
    assert state(system, "n1", "status", "attempts", "error_class") == ("retry_wait", 1, "row_rejected")
    assert system.wave(wave) == ("written", 4, 1, 0)
    system.put("n1", "changed")
    system.refuse("nobody")
    system.pass_time(10)
    assert drain(system).indexed == 1


@pytest.mark.ids("A-24", "E08")
def test_a_text_that_fails_alone_costs_its_row_alone(system: System):
    for source_id in ("a", "poison", "c", "d"):
        system.put(source_id, source_id)
    system.embedder.reject = reject("poison", AnswerContract("zero"))
    counts = drain(system, limits=Limits(rows=10))
    assert (counts.claimed, counts.indexed, counts.failed) == (4, 3, 1)
    assert system.stamped() == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("error_class", "resting"), [(ErrorClass.RATE_LIMITED, "cooling"), (ErrorClass.WARMING, "warming")]
)
def test_trouble_of_the_endpoint_charges_nobody_and_lets_it_rest(system: System, error_class: ErrorClass, resting: str):
    system.put("a", "text")

    def troubled(_: Sequence[str]) -> None:
        raise EndpointTrouble("not now", error_class=error_class)

    system.embedder.before = troubled
    with pytest.raises(EndpointTrouble):
        drain(system)
    assert state(system, "a", "status", "attempts", "crashes") == ("pending", 0, 0)
    assert system.endpoint_state == resting
    system.embedder.before = lambda texts: None
    assert drain(system).indexed == 1
    assert system.endpoint_state == "ok"


@pytest.mark.ids("A-29", "A-31")
def test_a_cancelled_drain_charges_nobody_whatever_else_went_wrong(system: System):
    system.put("a", "text")
    stop = Stop()

    def cancelled(_: Sequence[str]) -> None:
        stop.cancel()
        raise OSError("broken pipe")

    system.embedder.before = cancelled
    with pytest.raises(Cancelled):
        drain(system, stop=stop)
    assert state(system, "a", "status", "attempts", "crashes", "timeouts") == ("pending", 0, 0, 0)


@pytest.mark.ids("B-30")
def test_a_defect_is_not_filed_and_its_wave_is_left_to_lapse(system: System):
    system.put("a", "text")

    def broken(_: Sequence[str]) -> None:
        raise ZeroDivisionError

    system.embedder.before = broken
    with pytest.raises(ZeroDivisionError):
        drain(system)
    assert state(system, "a", "status", "attempts") == ("leased", 0)
    system.embedder.before = lambda texts: None
    assert drain(system).claimed == 0
    system.pass_time(1000)
    assert drain(system).indexed == 1


def test_a_re_execution_claims_only_what_its_ancestors_left(system: System):
    for source_id in ("a", "b"):
        system.put(source_id, "text")
    enqueue(system)
    mine, other = claimed(system, 1, run_id="mine"), claimed(system, 1, run_id="other")
    assert system.ports.outbox.claim("child", 9, ancestors=["mine"]) is None
    for wave in (mine, other):
        system.ports.outbox.release(wave)
    again = system.ports.outbox.claim("child", 9, ancestors=["mine"])
    assert again is not None
    assert again.source_ids == mine.source_ids
    assert again.token != mine.token


ALL = 24  # a quarter of it is more than all the retries there can be: which wait longer is left to chance
WORDS = ("one", "two", "three", "poison", "refused", None, "")


@pytest.mark.ids("A-73")
@pytest.mark.parametrize("seed", range(6))
def test_any_history_ends_alike_in_memory_and_in_postgres(request: pytest.FixtureRequest, seed: int):
    memory, postgres = MemorySystem(), postgres_system(request)
    waves: list[tuple[Wave, Wave]] = []
    for system in (memory, postgres):
        system.embedder.reject = reject("poison", AnswerContract("not now"))
    steps = random.Random(seed)
    for number in range(60):
        step, ids = steps.choice(STEPS), steps.sample("abcdef", 2)
        word, good, size = steps.choice(WORDS), steps.random() < 0.8, steps.randint(1, 4)
        results = []
        for place, system in enumerate((memory, postgres)):
            mine = [pair[place] for pair in waves]
            results.append(step(system, ids, word, good, size, mine))
        if isinstance(results[0], Wave) and isinstance(results[1], Wave):
            waves.append((results[0], results[1]))
            assert results[0].source_ids == results[1].source_ids, f"step {number}"
        else:
            assert results[0] == results[1], f"step {number}: {step.__name__}"
        assert seen(memory) == seen(postgres), f"step {number}: {step.__name__}"


def seen(system: System) -> dict[str, Any]:
    """All that a history has led to."""
    rows_of = {i: (system.entry(i), system.bodies(i), system.fresh(i), system.outcomes(i)) for i in "abcdef"}
    return {**rows_of, "stamped": system.stamped(), "invalidated": system.invalidated()}


def put(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.put(ids[0], word and f"{word} {ids[0]}", good=good)


def remove(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.remove(ids[0])


def say(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.say(*ids, forced=not good)


def scan(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    report = enqueue(system)
    return report.created, report.folded, report.revived


def fold(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return enqueue(system, scan=False).created if waves else scan(system, ids, word, good, size, waves)


def take(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Wave | None:
    return system.ports.outbox.claim("run", ALL)


def do_stage(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return attempt(lambda: pipeline.stage(system.ports, waves[-1], Stop())) if waves else None


def do_write(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return attempt(lambda: pipeline.write(system.ports, waves[-size % len(waves)], Stop())) if waves else None


def give_back(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return system.ports.outbox.release(waves[-1], timed_out=good) if waves else None


def charge(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return attempt(lambda: fail(system, waves[-1], *ids, deterministic=not good)) if waves else None


def wait(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.pass_time(1000 if good else 20)


def purge(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.purge_ledger()
    if not good:
        system.lose_plans()


def drain_all(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> Any:
    return replace(drain(system, limits=Limits(rows=ALL)), tokens=0)


def refuse(system: System, ids: list[str], word: str | None, good: bool, size: int, waves: list[Wave]) -> None:
    system.refuse(*(ids if good else ["nobody"]))


def attempt(action: Callable[[], Counts]) -> Any:
    try:
        return replace(action(), tokens=0)
    except LeaseLost:
        return "lost"


STEPS = (put, put, put, remove, say, scan, fold, take, take, do_stage, do_stage, do_write, do_write)
STEPS += (give_back, charge, wait, purge, drain_all, refuse)

"""When a drain is asked for: the rule alone, on numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embed_assets.defs.decision import Decision, InFlight, Look, decide, pause
from embed_assets.embedding.shared import Rest
from embed_assets.models import Backlog

NOTHING = Backlog(due=0, feed=0, expired=0, leased=0, dead=0, waiting=0, limit=10_000, paused=False)
QUIET = Look(NOTHING, None, busy=False)


def look(**numbers: int) -> Look:
    return replace(QUIET, backlog=replace(NOTHING, **numbers))


def decided(given: Look, flight: InFlight | None = None, drains: int = 2) -> Decision:
    return decide(given, flight or InFlight(), drains=drains, rows_per_run=100)


@pytest.mark.parametrize("what", ["due", "feed", "expired"])
def test_due_entries_feed_rows_and_expired_waves_ask_for_a_run(what: str) -> None:
    assert decided(look(**{what: 1})).run


def test_a_stale_source_asks_for_a_run_that_scans() -> None:
    decision = decided(replace(QUIET, stale=True))
    assert (decision.run, decision.scan) == (True, True)
    assert not decided(look(due=1)).scan


@pytest.mark.parametrize("what", ["dead", "waiting", "leased"])
@pytest.mark.ids("Q17", "D20")
def test_what_a_run_cannot_take_up_asks_for_none_and_is_told(what: str) -> None:
    decision = decided(look(**{what: 3}))
    assert not decision.run
    assert f"{what} 3" in decision.text


@pytest.mark.ids("D20")
def test_the_reason_names_every_number() -> None:
    decision = decided(replace(QUIET, backlog=replace(NOTHING, waiting=2, next_due_seconds=31.4, dead=10_000)))
    assert decision.text == (
        "Nothing due; pending 0, feed 0, leased 0, waiting 2 (next in 31 s), dead 10000+, revivable 0, "
        "expired waves 0, stale no"
    )


def test_a_paused_kind_and_a_resting_endpoint_ask_for_nothing_whatever_is_due() -> None:
    due = look(due=500, feed=9)
    assert "Paused" in decided(replace(due, backlog=replace(due.backlog, paused=True))).text
    resting = decided(replace(due, resting=Rest("cooling", "rate_limited: slow down", 29.6)))
    assert not resting.run
    assert "cooling for 30 s more (rate_limited: slow down)" in resting.text
    assert "pending 500" in resting.text


def test_while_another_enqueuer_is_at_work_its_business_is_left_to_it() -> None:
    busy = replace(look(feed=5), busy=True, stale=True)
    assert "another enqueuer" in decided(busy).text
    assert decided(replace(busy, backlog=replace(busy.backlog, due=1))).run


def test_no_more_drains_than_may_be_in_flight() -> None:
    assert decided(look(due=500), InFlight(running=1)).run
    assert not decided(look(due=500), InFlight(running=2)).run
    assert decided(look(due=500), InFlight(running=2), drains=3).run


def test_a_drain_that_is_starting_is_waited_for_unless_more_is_due_than_it_can_take() -> None:
    starting = InFlight(running=1, starting=1)
    assert not decided(look(due=100), starting).run
    assert decided(look(due=101), starting).run
    assert not decided(replace(QUIET, stale=True), starting).run


def test_drains_that_come_to_nothing_slow_the_next_one_down() -> None:
    due, stale = look(due=1), replace(QUIET, stale=True)
    assert pause(due, InFlight(fruitless=1)) == 0
    assert [pause(due, InFlight(fruitless=n)) for n in (2, 3, 4, 8)] == [20, 40, 60, 60]
    assert pause(stale, InFlight(fruitless=8)) == 600
    assert pause(due, InFlight(fruitless=8, failed=True)) == 600
    assert not decided(due, InFlight(fruitless=2, ended_seconds_ago=19)).run
    assert decided(due, InFlight(fruitless=2, ended_seconds_ago=21)).run

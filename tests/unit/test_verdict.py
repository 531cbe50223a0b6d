"""The word about a kind, by its rules: 18 cases, and what is not known."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import product

import pytest

from embed_assets.resources.verdict import Facts, State, facts_of, verdict

OK, WORK, BAD = State.HEALTHY, State.INDEXING, State.DEGRADED

CASES = [
    # work, failed, succeeded, indexed, expected → state
    ("nothing was ever done and nothing is expected", (0, 0, 0, None, None), OK),
    ("everything is done", (0, 0, 9, 9, 9), OK),
    ("everything is done, and nobody counted", (0, 0, 9, None, None), OK),
    ("more is indexed than expected: leftovers", (0, 0, 9, 10, 9), OK),
    ("expected is not known", (0, 0, 9, 3, None), OK),
    ("indexed is not known", (0, 0, 9, None, 9), OK),
    ("work is open", (5, 0, 9, 9, 14), WORK),
    ("the first load", (9, 0, 0, 0, 9), WORK),
    ("work is open, nobody counted", (5, 0, 0, None, None), WORK),
    ("work is open, less failed than succeeded", (5, 2, 3, None, None), WORK),
    ("as many failed as succeeded: not stalled", (5, 3, 3, None, None), WORK),
    ("more failed than succeeded, but more is indexed", (5, 4, 3, 9, 9), WORK),
    ("more failed than succeeded, as many as are indexed", (5, 4, 3, 4, 9), WORK),
    ("stalled: more failed than succeeded, nobody counted", (5, 4, 3, None, None), BAD),
    ("stalled: more failed than succeeded and than is indexed", (5, 4, 3, 3, 9), BAD),
    ("an open failure and no work", (0, 1, 9, 9, 9), BAD),
    ("a shortfall that is known", (0, 0, 8, 8, 9), BAD),
    ("nothing but failures", (0, 9, 0, 0, 9), BAD),
]


@pytest.mark.ids("C-57")
@pytest.mark.parametrize(("numbers", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_case_has_its_word(numbers: tuple[int, int, int, int | None, int | None], expected: State):
    assert verdict(Facts(*numbers)).state is expected


@pytest.mark.ids("C-57")
def test_the_rules_hold_for_all_small_numbers():
    for work, failed, succeeded, indexed in product(range(4), repeat=4):
        facts = Facts(work, failed, succeeded, indexed, 3)
        stalled = failed > 0 and failed > succeeded and failed > indexed
        expected = WORK if work and not stalled else BAD if failed or indexed < 3 else OK
        assert verdict(facts).state is expected, facts


@pytest.mark.ids("C-58")
def test_what_nobody_counted_is_no_shortfall_and_hides_no_failure():
    for indexed, expected in ((None, None), (None, 9), (3, None)):
        assert verdict(Facts(0, 0, 0, indexed, expected)).state is OK
        assert verdict(Facts(0, 1, 0, indexed, expected)).state is BAD
    assert verdict(Facts(1, 1, 0, None, 9)).state is BAD
    assert verdict(Facts(1, 1, 0, 1, 9)).state is WORK


def test_a_frozen_model_degrades_whatever_is_under_way():
    found = verdict(Facts(5, 0, 9, 9, 14, frozen_since=datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)))
    assert found.state is BAD
    assert "frozen since 2026-01-02 03:04" in found.reason


def test_the_states_of_all_rows_become_facts():
    counts = {"dead": 1, "leased": 2, "waiting": 3, "due": 4, "fresh": 5, "dismissed": 6, "excluded": 7}
    facts = facts_of(counts, stamped=8)
    assert facts == Facts(work=9, failed=4, succeeded=5, indexed=8, expected=15)


@pytest.mark.ids("B-48")
def test_the_reason_says_how_many_failed_or_are_missing():
    assert verdict(Facts(0, 2, 1)).reason == "stalled: more failed than the 1 that succeeded; 2 rows failed"
    assert verdict(Facts(0, 0, 8, 8, 9)).reason == "1 of 9 rows are not searchable"
    assert verdict(Facts(7, 1, 9)).reason == "7 rows to do, 1 failed"

"""Whether to ask for a drain: pure, from numbers that were read. The rule of sensor and schedule alike.

A run is asked for only when it can change something. So what a run could not take up now does not count (a feed that
another enqueuer is folding, a dead letter, a retry that is not due), and drains that came to nothing slow the next
one down, whatever the cause.
What does not belong here: reading the numbers (`resources/watch.py`, `in_flight.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from embed_assets.embedding.shared import Rest
from embed_assets.models import Backlog

PATIENCE = 2
SHORTEST_PAUSE = 20.0
LONGEST_PAUSE = 600.0
LONGEST_PAUSE_WHEN_DUE = 60.0


@dataclass(frozen=True)
class Look:
    """One look at a kind. `busy`: an enqueuer is at work; `stale`: a scan would find something."""

    backlog: Backlog
    resting: Rest | None
    busy: bool
    stale: bool = False

    @property
    def claimable(self) -> int:
        """What a run can take up without another enqueuer's leave: rows, and expired waves."""
        return self.backlog.due + self.backlog.expired

    @property
    def work(self) -> int:
        enqueueable = 0 if self.busy else self.backlog.feed + self.backlog.revivable + int(self.stale)
        return self.claimable + enqueueable


@dataclass(frozen=True)
class InFlight:
    """Drains of a kind. `fruitless`: the newest finished ones that came to nothing, `failed` when the last was red."""

    running: int = 0
    starting: int = 0
    fruitless: int = 0
    failed: bool = False
    ended_seconds_ago: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Ask for a run, or not; `text` says why, with numbers. `scan`: the run is to scan at once."""

    run: bool
    text: str
    scan: bool = False


def idle(look: Look) -> Decision | None:
    """The answer when nothing may or need be done, whatever is in flight; None when there is work."""
    if look.backlog.paused:
        return _skip(f"paused; {numbers(look)}")
    if look.resting:
        rest = look.resting
        return _skip(f"the endpoint is {rest.state} for {rest.seconds:.0f} s more ({rest.reason}); {numbers(look)}")
    if look.work == 0:
        busy = "another enqueuer is at work; " if look.busy else ""
        return _skip(f"nothing due; {busy}{numbers(look)}")
    return None


def decide(look: Look, flight: InFlight, *, drains: int, rows_per_run: int) -> Decision:
    """Ask, or say why not. `drains`: how many may be in flight; `rows_per_run`: what one of them takes."""
    if answer := idle(look):
        return answer
    text = f"{numbers(look)}, drains in flight {flight.running}"
    if (left := pause(look, flight) - flight.ended_seconds_ago) > 0:
        what = "failed" if flight.failed else "found nothing to do"
        return _skip(f"the last {flight.fruitless} drains {what}, the next in {left:.0f} s; {text}")
    if flight.running >= drains:
        return _skip(f"{flight.running} drains are in flight, as many as may be; {text}")
    if flight.starting and look.work <= flight.starting * rows_per_run:
        return _skip(f"a drain is starting and takes up to {flight.starting * rows_per_run} rows; {text}")
    return Decision(True, text, scan=look.stale)


def pause(look: Look, flight: InFlight) -> float:
    """Seconds to leave between drains that come to nothing: 20, 40, … 600; at most 60 while rows are due."""
    if flight.fruitless < PATIENCE:
        return 0.0
    longest = LONGEST_PAUSE if flight.failed or not look.claimable else LONGEST_PAUSE_WHEN_DUE
    return float(min(longest, SHORTEST_PAUSE * 2 ** (flight.fruitless - PATIENCE)))


def numbers(look: Look) -> str:
    backlog = look.backlog
    waiting = f"waiting {_count(backlog.waiting, backlog)}"
    if backlog.next_due_seconds is not None and backlog.waiting:
        waiting += f" (next in {max(0.0, backlog.next_due_seconds):.0f} s)"
    return (
        f"pending {_count(backlog.due, backlog)}, feed {_count(backlog.feed, backlog)}, "
        f"leased {_count(backlog.leased, backlog)}, {waiting}, dead {_count(backlog.dead, backlog)}, "
        f"revivable {_count(backlog.revivable, backlog)}, "
        f"expired waves {backlog.expired}, stale {'yes' if look.stale else 'no'}"
    )


def _count(number: int, backlog: Backlog) -> str:
    return f"{number}+" if number >= backlog.limit else str(number)


def _skip(text: str) -> Decision:
    return Decision(False, text[0].upper() + text[1:])
